// What was done to weights and keys, by whom and why: the newest entries of the ledger.

import { byId, el } from "./dom.js";
import { Table, clock } from "./table.js";

const FAILED = new Set(["abort", "revert"]);
const COLUMNS = [
  { head: "Number", header: true, kind: "number", value: (e) => e.number },
  { head: "At", value: (e) => clock(e.at) },
  { head: "Action", value: (e) => e.action, render: (e) => el("span", { class: FAILED.has(e.action) ? "error" : "" }, e.action) },
  { head: "Who", value: (e) => e.who },
  { head: "What", value: (e) => [e.version === null ? "" : `version ${e.version}`, e.subject].filter(Boolean).join(", ") },
  { head: "Reason", value: (e) => e.reason },
  { head: "Outcome", value: (e) => e.outcome },
];

export class LedgerView {
  constructor() {
    this.table = new Table(byId("ledger"), COLUMNS, (e) => e.number, "Nothing has been written yet.");
  }

  update(entries) {
    this.table.update(entries);
  }
}
