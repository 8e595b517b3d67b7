// A form in a dialog: it asks before anything is done, follows it, and says how it ended. Closing the dialog does not
// stop what was asked for. The page has the fields, in <dialog id="NAME-dialog">; all around them is made here.

import { byId, el, setText } from "./dom.js";

export class FormDialog {
  // `onDone`: called when the gateway has answered, whatever it was.
  constructor(name, onDone = () => {}) {
    this.onDone = onDone;
    this.underway = false;
    this.dialog = byId(`${name}-dialog`);
    this.form = this.dialog.querySelector("form");
    this.title = el("h2", { id: `${name}-dialog-title` });
    this.text = el("p", { id: `${name}-dialog-text` });
    this.progress = el("p", { id: `${name}-progress`, role: "status" });
    this.result = el("p", { id: `${name}-result`, role: "alert" });
    this.go = el("button", { id: `${name}-go`, type: "submit", class: "main" });
    this.shut = el("button", { id: `${name}-close`, type: "button" }, "Cancel");
    this.dialog.setAttribute("aria-labelledby", this.title.id);
    this.dialog.setAttribute("aria-describedby", this.text.id);
    this.dialog.prepend(this.title, this.text);
    this.form.append(this.progress, this.result, el("div", { class: "row" }, this.go, this.shut));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.shut.addEventListener("click", () => this.dialog.close());
  }

  // Asks, unless something that was asked for before is still under way: then it shows that.
  show(title, text, verb) {
    if (this.dialog.open) return;
    if (!this.underway) {
      setText(this.title, title);
      setText(this.text, text);
      setText(this.go, verb);
      setText(this.shut, "Cancel");
      this.go.hidden = false;
      this.say("", "");
    }
    this.opener = document.activeElement;
    this.dialog.showModal();
    (this.underway ? this.shut : this.first ?? this.shut).focus(); // on Cancel, Enter by mistake does nothing
    this.dialog.addEventListener("close", () => this.opener?.focus(), { once: true });
  }

  // `send`, of each dialog, asks the gateway and says how it ended. After an error it may be tried again.
  async run() {
    if (this.underway) return;
    this.underway = true;
    this.go.disabled = true;
    setText(this.shut, "Close");
    this.say("", "");
    setText(this.progress, "asked for");
    try {
      await this.send();
      this.go.hidden = true;
    } catch (error) {
      this.say(error.line ?? error.message, "error");
    }
    setText(this.progress, "");
    this.underway = false;
    this.go.disabled = false;
    if (this.dialog.open) this.shut.focus();
    this.onDone();
  }

  say(text, kind) {
    this.result.className = kind;
    setText(this.result, text);
  }

  // Whether the answer is that a second identity has to agree first; then that is said.
  waits({ pending }) {
    if (pending) this.say(`It waits for approval by somebody else: hotswap approve ${pending.id}`, "");
    return Boolean(pending);
  }

  value(name) {
    return this.form.elements.namedItem(name).value.trim();
  }

  because() {
    return `?reason=${encodeURIComponent(this.value("reason"))}`;
  }
}
