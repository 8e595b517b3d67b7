// The swaps that have ended: a picture of what each cost, and everything about them as a table.

import { HEIGHT, MARGIN, round } from "./chart.js";
import { byId, el, svg } from "./dom.js";
import { Table, clock, number } from "./table.js";
import { badge, served, versionName } from "./versions.js";

const DRAWN = 40;
const DECADES = [0.1, 1, 10, 100, 1000, 10000, 100000]; // ms

const COLUMNS = [
  { head: "Ended", header: true, value: (s) => clock(s.ended_at) },
  { head: "Swap to", value: swapTo, render: (s) => (s.split ? swapTo(s) : badge(s.version)) },
  { head: "Before", value: before },
  { head: "Outcome", value: (s) => s.outcome, render: (s) => el("span", { class: s.outcome === "done" ? "good" : "error" }, s.outcome) },
  { head: "Mode", value: (s) => s.mode },
  { head: "Stall, ms", kind: "number", value: (s) => number(s.stall_ms, 2) },
  { head: "Prepare, ms", kind: "number", value: (s) => number(s.prepare_ms) },
  { head: "Commit, ms", kind: "number", value: (s) => number(s.commit_ms, 1) },
  { head: "Verified", value: verification },
  { head: "Instances", value: (s) => s.flips.map(flip).join("; ") },
  { head: "Reason", value: reason },
];

export class SwapsView {
  constructor(announcer) {
    this.announcer = announcer;
    this.newest = undefined;
    this.swaps = [];
    this.table = new Table(byId("swaps"), COLUMNS, (s) => s.id, "No swap has ended yet.");
    this.figure = byId("timeline");
    this.picture = svg("svg", { role: "img", height: HEIGHT, class: "gone" });
    this.figure.append(this.picture);
    new ResizeObserver(() => this.#draw()).observe(this.figure);
  }

  update(swaps) {
    const newest = swaps[0];
    if (this.newest !== undefined && newest && newest.id !== this.newest) this.#announce(newest);
    this.newest = newest?.id ?? null;
    this.swaps = swaps;
    this.table.update(swaps.map((swap, at) => ({ ...swap, older: swaps.slice(at + 1).find((s) => s.outcome === "done") })));
    this.#draw();
  }

  forget() {
    this.update([]);
    this.newest = undefined; // the next ones seen are no news
  }

  #announce(swap) {
    const what = swap.outcome === "done" ? "serves now" : `was not taken: ${reason(swap)}`;
    this.announcer.say(`${swap.split ? swapTo(swap) : `Weight version ${swap.version}`} ${what}.`);
  }

  #draw() {
    const shown = this.swaps.slice(0, DRAWN).reverse();
    this.picture.classList.toggle("gone", shown.length === 0);
    if (!shown.length) return;
    const width = Math.max(240, this.figure.clientWidth);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const step = (width - MARGIN.left - MARGIN.right) / shown.length;
    const every = Math.max(1, Math.ceil(34 / step));
    const columns = shown.map((swap, at) => column(swap, MARGIN.left + step * (at + 0.5), at % every === 0));
    this.picture.replaceChildren(...grid(width), ...columns);
    const failed = shown.filter((swap) => swap.outcome !== "done").length;
    const label = `${shown.length} swaps, ${failed} aborted; the last: ${inWords(shown.at(-1))}. The table below has all of it.`;
    this.picture.setAttribute("aria-label", label);
  }
}

function swapTo(swap) {
  return served(swap.version, swap.split);
}

// The version that served before: `previous` does not tell it of a split, which the active version has outlasted.
function before(swap) {
  if (swap.older) return swapTo(swap.older);
  return swap.previous === null ? "–" : versionName(swap.previous);
}

// The version that a swap has brought: with a split, the ones beside the version that stays.
export function brought(swap) {
  return swap.split ? swap.split.shares.map((share) => `+${versionName(share.version)}`).join("") : versionName(swap.version);
}

function y(ms) {
  const share = Math.log10(Math.min(Math.max(ms, DECADES[0]), DECADES.at(-1)) / DECADES[0]) / (DECADES.length - 1);
  return round(MARGIN.top + (1 - share) * (HEIGHT - MARGIN.top - MARGIN.bottom));
}

function grid(width) {
  return DECADES.filter((_, at) => at % 2 === 1).flatMap((ms) => [
    svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(ms), y2: y(ms) }),
    svg("text", { x: MARGIN.left - 6, y: y(ms) + 4, "text-anchor": "end" }, ms < 1000 ? `${ms} ms` : `${ms / 1000} s`),
  ]);
}

function column(swap, x, labelled) {
  const at = round(x);
  const marks = [svg("title", {}, inWords(swap))];
  const { stall_ms: stall, prepare_ms: prepare, commit_ms: commit } = swap;
  if (stall !== null) marks.push(svg("circle", { class: "stall", cx: at, cy: y(stall), r: 4 }));
  if (prepare !== null) marks.push(svg("path", { class: "prepare", d: `M${at} ${y(prepare) - 5}l5 9h-10z` }));
  if (commit !== null) marks.push(svg("rect", { class: "commit", x: at - 4, y: y(commit) - 4, width: 8, height: 8 }));
  if (swap.outcome !== "done") marks.push(svg("path", { class: "aborted", d: `M${at - 5} 10l10 10m0 -10l-10 10` }));
  if (labelled) marks.push(svg("text", { x: at, y: HEIGHT - 6, "text-anchor": "middle" }, brought(swap)));
  return svg("g", {}, ...marks);
}

function inWords(swap) {
  const cost = swap.outcome === "done" ? `stalled ${number(swap.stall_ms, 2)} ms, prepared in ${number(swap.prepare_ms)} ms` : reason(swap);
  return `${swapTo(swap)} ${swap.outcome}, ${cost}`;
}

function verification(swap) {
  const weights = { true: "fingerprint verified", false: "fingerprint differs", null: "not compared" }[String(swap.verified)];
  return swap.probe === null ? weights : `${weights}; probe ${swap.probe}`;
}

function flip(part) {
  const told = [];
  if (part.stall_ms !== null) told.push(`stall ${number(part.stall_ms, 2)} ms`);
  if (part.staging_gbps) told.push(`${number(part.staging_gbps, 2)} GB/s`);
  if (part.step_loss !== null) told.push(`steps ${number(100 * part.step_loss, 0)} % longer meanwhile`);
  return `${part.instance}${told.length ? ` (${told.join(", ")})` : ""}`;
}

function reason(swap) {
  const tensor = swap.tensor ? ` (tensor ${swap.tensor})` : "";
  return swap.reason ? `${swap.reason}${tensor}` : "";
}
