// How weight versions look: a tint and a kind of underline that go with the number, and the number itself. So colour is
// never the only sign, and a version looks the same in the chat, the fleet and the timeline.

import { el } from "./dom.js";

export const STYLES = 6;

export function versionClass(version) {
  return Number.isInteger(version) ? `v${version % STYLES}` : "vnone";
}

export function versionName(version) {
  return Number.isInteger(version) ? `v${version}` : "no version";
}

export function badge(version) {
  return el("span", { class: `badge ${versionClass(version)}` }, versionName(version));
}

// What each version has of the requests, in percent; empty where none shares them.
export function shares(active) {
  const others = (active?.split?.shares ?? []).map((share) => [share.version, share.percent]);
  const rest = 100 - others.reduce((sum, [, percent]) => sum + percent, 0);
  return new Map(others.length ? [[active.version, rest], ...others] : []);
}

// The version that serves, or others beside it with what each has of the requests.
export function served(version, split) {
  const others = split?.shares ?? [];
  if (!others.length) return versionName(version);
  const all = (told) => others.map(told).join(" and ");
  const repeated = others.some((share) => share.shadow) ? `, ${all((share) => `${share.shadow} %`)} repeated` : "";
  const percents = all((share) => `${share.percent} %`);
  return `${all((share) => versionName(share.version))} beside ${versionName(version)} (${percents} of the requests${repeated})`;
}

// Text written by versions: one run for each stretch of one version, marked with its number where it begins.
export class VersionedText {
  constructor(element) {
    this.element = element;
    this.tokens = new Map(); // version -> pieces that came from it
    this.version = undefined;
    this.run = null;
  }

  // Returns whether this piece began a run of another version than the one before.
  add(version, text) {
    const changed = this.run === null || version !== this.version;
    const crossed = changed && this.run !== null;
    if (changed) {
      this.version = version;
      this.run = document.createTextNode("");
      const attributes = { class: `run ${versionClass(version)}`, "data-version": versionName(version) };
      this.element.append(el("span", attributes, this.run));
    }
    this.run.appendData(text);
    this.tokens.set(version, (this.tokens.get(version) ?? 0) + 1);
    return crossed;
  }
}

// Which versions have written in this conversation, and how many tokens of the answers that were complete.
export class Legend {
  constructor(list) {
    this.list = list;
    this.items = new Map(); // version -> {tokens, text}
  }

  // `tokens`: as the end of an answer tells them; a piece of a stream does not say how many it has.
  add(version, tokens = 0) {
    let item = this.items.get(version);
    if (item === undefined) {
      item = { tokens: 0, text: document.createTextNode("") };
      this.items.set(version, item);
      this.list.append(el("li", { "data-version": versionName(version) }, badge(version), " ", item.text));
    }
    item.tokens += tokens;
    if (tokens) item.text.data = item.tokens === 1 ? "1 token" : `${item.tokens} tokens`;
  }
}
