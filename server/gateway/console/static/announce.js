// What is said to a screen reader: whole sentences of an answer, a few seconds apart, and events; never token by token.

const PAUSE_MS = 2000;
const KEPT = 20;

export class Announcer {
  constructor(region) {
    this.region = region;
    this.pending = "";
    this.timer = null;
  }

  say(text) {
    const said = document.createElement("p");
    said.textContent = text;
    this.region.append(said);
    while (this.region.childElementCount > KEPT) this.region.firstElementChild.remove();
  }

  // Text that goes on: held back until a sentence ends, and at least for a pause.
  add(text) {
    this.pending += text;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.#sayWhole();
    }, PAUSE_MS);
  }

  // The text is complete: the rest of it.
  end() {
    clearTimeout(this.timer);
    this.timer = null;
    if (this.pending.trim()) this.say(this.pending.trim());
    this.pending = "";
  }

  #sayWhole() {
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.pending.lastIndexOf(mark)));
    if (end > 0) {
      this.say(this.pending.slice(0, end + 1).trim());
      this.pending = this.pending.slice(end + 1);
    }
    if (this.pending) this.add("");
  }
}
