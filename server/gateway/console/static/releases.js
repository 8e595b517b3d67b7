// The release under way, or the last one: where it is, what is known of its conditions, how long its step lasts, and a
// way to take it back.

import { byId, el, setText } from "./dom.js";
import { Table } from "./table.js";
import { versionName } from "./versions.js";

const BAD = new Set(["harmed", "blind"]);
const COLUMNS = [
  { head: "Condition", header: true, value: (f) => f.condition },
  { head: "State", value: (f) => f.state, render: (f) => el("span", { class: BAD.has(f.state) ? "error" : "" }, f.state) },
  { head: "Candidate", value: (f) => interval(f.candidate) },
  { head: "Stable", value: (f) => interval(f.stable) },
  { head: "What is known", value: (f) => f.text.slice(f.text.indexOf(": ") + 2) },
];

export class ReleasesView {
  constructor(api, announcer, look) {
    this.api = api;
    this.announcer = announcer;
    this.look = look;
    this.state = null; // null: not known yet
    this.table = new Table(byId("findings"), COLUMNS, (f) => f.condition, "Nothing is judged now.");
    this.cancel = byId("release-cancel");
    this.cancel.addEventListener("click", () => this.#cancel());
  }

  update(release, findings) {
    this.table.update(findings);
    this.cancel.disabled = !underWay(release);
    setText(byId("release-now"), release === null ? "No version was released yet." : sentence(release));
    this.#brief(underWay(release) ? `Release of ${sentence(release)}` : "");
    this.#steps(release);
    const state = release === null ? "" : `${versionName(release.version)} ${release.state.replace("_", " ")}`;
    if (this.state !== null && this.state !== state && state) this.announcer.say(`Release of ${state}.`);
    this.state = state;
  }

  forget() {
    this.state = null;
    this.table.update([]);
    this.#steps(null);
    this.cancel.disabled = true;
    this.#brief("");
    setText(byId("release-now"), "");
    setText(byId("release-problem"), "");
  }

  // In the page's head, as long as there is something to decide.
  #brief(text) {
    byId("release-brief").hidden = !text;
    setText(byId("release-brief"), text);
  }

  // One part of the bar a step: its percent of the requests, and what is left of the one under way.
  #steps(release) {
    const bar = byId("release-steps");
    const steps = release === null || release.ended ? [] : release.plan;
    while (bar.children.length > steps.length) bar.lastElementChild.remove();
    steps.forEach((step, at) => {
      if (bar.children.length <= at) bar.append(el("li"));
      const item = bar.children[at];
      const now = at === release.step;
      item.className = at < release.step ? "past" : now ? "now" : "";
      if (now) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
      const left = now && release.left_s !== null ? `, ${duration(release.left_s)} left` : "";
      setText(item, `${step.traffic} %${left}`);
    });
  }

  async #cancel() {
    try {
      await this.api.json("/admin/releases/cancel", { method: "POST", body: {} });
      setText(byId("release-problem"), "");
    } catch (error) {
      setText(byId("release-problem"), error.line ?? error.message);
    }
    this.look();
  }
}

// Whether it can still be taken back.
export function underWay(release) {
  return release !== null && !release.ended && release.state !== "rolling_back";
}

function sentence(release) {
  const why = release.reason ? `: ${release.reason}` : "";
  const names = `${versionName(release.version)}, over ${versionName(release.stable)}`;
  if (release.ended || !["applying", "judging", "held"].includes(release.state)) {
    return `${names}: ${release.state.replace("_", " ")}${why}`;
  }
  const shadow = release.shadow ? `, ${release.shadow} % repeated` : "";
  return `${names}: step ${release.step + 1} of ${release.steps}, ${release.traffic} % of the requests${shadow}, ${release.state}${why}`;
}

function duration(seconds) {
  return seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

function interval(bounds) {
  if (bounds === null) return "–";
  const [low, high] = bounds.map((bound) => (bound === null ? "" : String(Number(bound.toPrecision(4)))));
  return low || high ? `${low} to ${high}` : "–";
}
