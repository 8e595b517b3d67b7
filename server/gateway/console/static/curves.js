// Throughput of the fleet, and what the trainer reports.

import { LineChart } from "./chart.js";
import { byId } from "./dom.js";
import { brought } from "./swaps.js";
import { clock } from "./table.js";

const training = { x: (p) => p.step, xText: (step) => `step ${Math.round(step)}`, xName: "Step" };
const SILENT = "Nothing yet: a trainer reports its steps to POST /admin/training/metrics.";

export class CurvesView {
  constructor() {
    this.throughput = new LineChart(byId("throughput"), {
      lines: [{ name: "tokens/s", pick: (p) => p.generation_tokens_per_s }],
      x: (p) => p.time,
      xText: clock,
      xName: "Time",
      empty: "Nothing yet: the first samples come in a few seconds.",
    });
    this.reward = new LineChart(byId("reward"), {
      ...training,
      lines: [
        { name: "reward", pick: (p) => p.reward ?? p.reward_mean },
        { name: "held-out accuracy (dashed)", pick: (p) => p.accuracy },
      ],
      digits: 2,
      empty: SILENT,
    });
    this.loss = new LineChart(byId("loss"), { ...training, lines: [{ name: "loss", pick: (p) => p.loss }], digits: 3, empty: SILENT });
  }

  update(series, swaps) {
    const commits = swaps.filter((s) => s.committed_at !== null).slice(0, 8);
    this.throughput.update(series.throughput, commits.map((s) => ({ x: s.committed_at, text: brought(s) })));
    this.reward.update(series.training);
    this.loss.update(series.training);
  }
}
