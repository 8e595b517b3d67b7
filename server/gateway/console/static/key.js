// The key that was typed in. It is kept in memory, or for this tab if so wished; it travels in the Authorization header
// and nowhere else: not in an address, a cookie, or any storage that outlives the tab.

import { byId, setText } from "./dom.js";

const NAME = "hotswap-key";

export class Key {
  constructor() {
    this.value = storage((kept) => kept.getItem(NAME)) ?? "";
    this.kept = this.value !== "";
    this.onchange = () => {};
  }

  use(value, keep) {
    this.value = value.trim();
    this.kept = keep && this.value !== "";
    storage((kept) => (this.kept ? kept.setItem(NAME, this.value) : kept.removeItem(NAME)));
    this.onchange();
  }

  forget() {
    this.use("", false);
  }

  // The server does not take it: it is not sent again, and what was said about it stands.
  drop() {
    const told = this.onchange;
    this.onchange = () => {};
    this.forget();
    this.onchange = told;
  }
}

// A browser may refuse storage altogether; the key is then in memory alone.
function storage(use) {
  try {
    return use(sessionStorage);
  } catch {
    return null;
  }
}

// Says beside the form how the key is doing.
export function tell(text, bad = false) {
  const line = byId("key-message");
  line.className = bad ? "error" : "quiet";
  setText(line, text);
}

// Wires the form a key is typed into: it empties the field, so that the key is not left standing in the page.
export function wireKeyForm(form, key) {
  const field = form.elements.namedItem("key");
  const keep = form.elements.namedItem("keep");
  const forget = form.elements.namedItem("forget");
  keep.checked = key.kept;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    key.use(field.value, keep.checked);
    field.value = "";
  });
  forget.addEventListener("click", () => {
    key.forget();
    keep.checked = false;
    field.focus();
  });
}
