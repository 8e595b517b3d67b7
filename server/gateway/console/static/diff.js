// The tensors in which a version differs from the active one, the largest change first.

import { FormDialog } from "./dialog.js";
import { byId } from "./dom.js";
import { Table, number } from "./table.js";
import { versionName } from "./versions.js";

const MOST = 200; // rows
const ifChanged = (render) => (t) => (t.state === "changed" ? render(t) : "–");
const COLUMNS = [
  { head: "Tensor", header: true, value: (t) => t.name },
  { head: "State", value: (t) => t.state },
  { head: "Type", value: (t) => t.dtype },
  { head: "Elements", kind: "number", value: (t) => t.elements.toLocaleString() },
  { head: "Changed, %", kind: "number", value: ifChanged((t) => number((100 * t.changed) / Math.max(1, t.elements), 3)) },
  { head: "Largest change", kind: "number", value: ifChanged((t) => t.max_abs.toPrecision(3)) },
  { head: "Mean change", kind: "number", value: ifChanged((t) => t.mean_abs.toPrecision(3)) },
  { head: "Not finite", kind: "number", value: ifChanged((t) => t.not_finite) },
];

export class DiffDialog extends FormDialog {
  constructor(api) {
    super("diff");
    this.api = api;
    this.table = new Table(byId("diff"), COLUMNS, (t) => t.name, "No tensor to show.");
  }

  open(active, version) {
    if (!this.underway) {
      this.pair = `a=${active}&b=${version}`;
      this.table.update([]);
    }
    this.show(`${versionName(version)} beside ${versionName(active)}`, "", "Compare again");
    this.run();
  }

  async send() {
    const found = await this.api.json(`/admin/weights/diff?${this.pair}`);
    const { tensors } = found;
    const [changed, elements] = [found.changed, found.elements].map((count) => count.toLocaleString());
    this.table.update(tensors.slice(0, MOST));
    const rows = tensors.length > MOST ? ` The ${MOST} with the largest changes are shown.` : "";
    const all = `${tensors.length} of ${found.compared} tensors differ, ${changed} of ${elements} elements.`;
    this.say(all + rows, "");
  }
}
