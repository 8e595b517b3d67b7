// The admin port's page: the chat, and once a key is given, everything else, asked for once a second while it is seen.

import { Announcer } from "./announce.js";
import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { CurvesView } from "./curves.js";
import { DiffDialog } from "./diff.js";
import { byId, setText } from "./dom.js";
import { FleetView } from "./fleet.js";
import { Key, tell, wireKeyForm } from "./key.js";
import { KeysView } from "./keys.js";
import { LedgerView } from "./ledger.js";
import { PublishDialog } from "./publish.js";
import { ReleaseDialog } from "./release_dialog.js";
import { ReleasesView } from "./releases.js";
import { SwapDialog } from "./swap_dialog.js";
import { SwapsView } from "./swaps.js";
import { Talk } from "./talk.js";
import { badge, served, versionName } from "./versions.js";
import { WeightsView } from "./weights.js";

const PERIOD_MS = 1000;

class ConsolePage {
  constructor() {
    this.key = new Key();
    this.api = new Api(this.key, "/admin/");
    this.announcer = new Announcer(byId("announcements"));
    this.talk = new Talk(this.api);
    this.chat = new Chat(this.talk, this.announcer);
    const look = () => this.#look(true);
    this.dialog = new SwapDialog(this.api, look);
    this.publish = new PublishDialog(this.api, look);
    this.start = new ReleaseDialog(this.api, look);
    this.fleet = new FleetView();
    this.weights = new WeightsView(this.dialog, new DiffDialog(this.api));
    this.releases = new ReleasesView(this.api, this.announcer, look);
    this.keys = new KeysView(this.api, look);
    this.swaps = new SwapsView(this.announcer);
    this.ledger = new LedgerView();
    this.curves = new CurvesView();
    this.history = [];
    this.seen = null; // the swap the history was read after
    this.rounds = 0;
    this.looking = false;
    this.again = false;
    this.paused = null; // by whom; null: not known yet
    this.timer = null;
    this.key.onchange = () => this.#look();
    wireKeyForm(byId("key-form"), this.key);
    byId("model-choice").addEventListener("change", (event) => {
      this.#forget();
      this.#show(event.target.value);
      this.#look();
    });
    document.addEventListener("visibilitychange", () => document.hidden || this.#look());
    this.#look();
  }

  // One round, and the next in a second; while nobody sees the page, and without a key, there is none. `all`: with what
  // is not asked for in every round.
  async #look(all = false) {
    if (all) this.rounds = 0;
    if (this.looking) {
      this.again = true; // what is under way may have begun with another key
      return;
    }
    this.looking = true;
    this.again = false;
    clearTimeout(this.timer);
    try {
      await this.#round();
    } catch (error) {
      this.#problem(error);
    }
    this.looking = false;
    if (this.again) this.#look(true);
    else if (this.key.value && !document.hidden) this.timer = setTimeout(() => this.#look(), PERIOD_MS);
  }

  async #round() {
    if (this.talk.model === null) await this.#greet();
    this.asked = this.key.value;
    if (!this.key.value) {
      this.#forget();
      tell("The chat works without the admin key, where no key is asked.");
      return;
    }
    await this.#choose();
    const paths = ["/admin/instances", "/admin/weights", "/admin/swap", "/admin/pause", "/admin/releases"];
    const [{ instances }, weights, { swap }, pause, { release, findings }] = await Promise.all(paths.map((path) => this.api.json(path)));
    tell("The key works.");
    document.body.classList.remove("locked");
    this.fleet.update(instances);
    this.weights.update(weights, release);
    this.releases.update(release, findings);
    this.dialog.follow(swap, instances);
    this.publish.follow(swap, instances);
    this.publish.active = weights.active;
    this.start.update(weights.active, weights.versions);
    this.#now(weights.active, swap, pause, instances);
    await this.#past(swap);
    if (this.rounds % 5 === 0) {
      this.ledger.update((await this.api.json("/admin/ledger?limit=50")).entries);
      this.keys.update(await this.api.json("/admin/keys"));
    }
    if (this.rounds++ % 2 === 0) this.curves.update(await this.api.json("/admin/series"), this.history);
  }

  // Without the key nothing of what it showed stays on the page.
  #forget() {
    document.body.classList.add("locked");
    this.fleet.update([]);
    this.weights.update({ active: null, versions: [] }, null);
    this.releases.forget();
    this.swaps.forget();
    this.ledger.update([]);
    this.keys.update({ keys: [], inference: "keys" });
    this.start.update(null, []);
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    this.rounds = 0;
    this.curves.update({ throughput: [], training: [] }, []);
    this.seen = null;
    this.paused = null;
    for (const id of ["swap-now", "fleet-now", "pause-now"]) setText(byId(id), "");
    setText(byId("active"), "unknown");
  }

  async #greet() {
    try {
      setText(byId("model"), (await this.talk.findModel()) ?? "");
    } catch {
      setText(byId("model"), ""); // the chat says why when it is asked; the fleet may be shown all the same
    }
  }

  // Which model the page shows, where the gateway has several: the first, until another is chosen.
  async #choose() {
    if (this.rounds % 5 !== 0) return;
    const names = (await this.api.json("/admin/models")).models.filter((m) => m.kind === "instances").map((m) => m.name);
    const select = byId("model-choice");
    if (names.join() !== [...select.options].map((o) => o.value).join()) {
      select.replaceChildren(...names.map((name) => new Option(name, name, false, name === this.api.model)));
      byId("model-choose").hidden = names.length < 2;
    }
    if (names.length < 2) this.api.model = null;
    else if (!names.includes(this.api.model)) this.#show(names[0]);
  }

  #show(name) {
    this.api.model = name;
    this.talk.model = name;
    setText(byId("model"), name);
    byId("model-choice").value = name;
  }

  async #past(swap) {
    const now = swap === null ? "" : `${swap.id} ${swap.phase}`;
    if (now === this.seen) return;
    this.history = (await this.api.json("/admin/swaps")).swaps;
    this.seen = now;
    this.swaps.update(this.history);
  }

  #now(active, swap, pause, instances) {
    const shown = byId("active");
    if (shown.textContent !== versionName(active?.version)) shown.replaceChildren(badge(active?.version));
    const moving = swap?.in_flight ? `swap to ${served(swap.target, swap.split)}: ${swap.phase}` : "no swap under way";
    setText(byId("swap-now"), active ? `epoch ${active.epoch}, ${moving}` : moving);
    const asked = instances.filter((i) => i.eligible).length;
    setText(byId("fleet-now"), `· ${asked} of ${instances.length} instances get requests`);
    const names = pause.pauses.map((p) => p.requested_by).join(", ");
    setText(byId("pause-now"), names ? `Generation is paused by ${names}` : "");
    if (this.paused !== null && this.paused !== names) {
      this.announcer.say(names ? `Generation is paused by ${names}.` : "Generation goes on.");
    }
    this.paused = names;
  }

  #problem(error) {
    tell(error.line ?? `The console failed: ${error.message}`, true);
    if ((error.status !== 401 && error.status !== 403) || this.key.value !== this.asked) return;
    this.key.drop();
    this.#forget();
    this.again = false; // another round would have no key, and say so instead
  }
}

new ConsolePage();
