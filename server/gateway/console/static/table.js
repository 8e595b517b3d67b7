// Tables that are looked at while they change: rows and cells stay, and only what differs is written. So a button keeps
// its focus, a selection stays, and a screen reader is not sent back to the top every second.

import { el } from "./dom.js";

// A column: {head, value: item -> text, render?: item -> node, kind?: class, header?: true for the row's name}.
export class Table {
  constructor(table, columns, key, empty) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    const heads = columns.map((c) => el("th", { scope: "col", class: c.kind }, c.head));
    this.body = el("tbody");
    this.empty = el("tr", {}, el("td", { colspan: columns.length, class: "quiet" }, empty));
    table.append(el("thead", {}, el("tr", {}, ...heads)), this.body);
    this.body.append(this.empty);
  }

  update(items) {
    const wanted = items.map((item) => this.#row(item));
    const keep = new Set(wanted);
    for (const [key, row] of this.rows) if (!keep.has(row)) this.rows.delete(key);
    const order = wanted.length ? wanted.map((row) => row.element) : [this.empty];
    for (const child of [...this.body.children]) if (!order.includes(child)) child.remove();
    order.forEach((element, at) => {
      if (this.body.children[at] !== element) this.body.insertBefore(element, this.body.children[at] ?? null);
    });
  }

  #row(item) {
    const key = this.key(item);
    let row = this.rows.get(key);
    if (row === undefined) {
      const cells = this.columns.map((c) => el(c.header ? "th" : "td", { class: c.kind, scope: c.header && "row" }));
      row = { element: el("tr", {}, ...cells), cells, shown: [] };
      this.rows.set(key, row);
    }
    this.columns.forEach((column, at) => {
      const value = String(column.value(item) ?? "");
      if (row.shown[at] === value) return;
      row.shown[at] = value;
      row.cells[at].replaceChildren(column.render ? column.render(item) : value);
    });
    return row;
  }
}

export function number(value, digits = 0) {
  return typeof value === "number" && Number.isFinite(value) ? value.toFixed(digits) : "–";
}

export function clock(seconds) {
  return typeof seconds === "number" ? new Date(seconds * 1000).toLocaleTimeString([], { hour12: false }) : "–";
}

export function day(seconds) {
  return new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short", hour12: false });
}
