// The instances: what state each is in, what it runs, how loaded it is, and whether it gets requests.

import { byId, el } from "./dom.js";
import { Table, number } from "./table.js";
import { badge, versionName } from "./versions.js";

export function short(fingerprint) {
  return fingerprint ? fingerprint.slice(0, 10) : "–";
}

export function fingerprintCell(fingerprint) {
  return el("code", { title: fingerprint || null }, short(fingerprint));
}

const signal = (name, digits = 0) => (i) => number(i.signals?.[name], digits);

const COLUMNS = [
  { head: "Instance", header: true, kind: "id", value: (i) => i.id },
  { head: "State", value: (i) => i.state },
  { head: "Version", value: (i) => i.active_version, render: (i) => badge(i.active_version) },
  { head: "Staged", value: (i) => (i.staged_version === null ? "–" : versionName(i.staged_version)) },
  { head: "Fingerprint", value: (i) => i.fingerprint, render: (i) => fingerprintCell(i.fingerprint) },
  { head: "Health", value: health },
  { head: "GPUs", value: devices, render: (i) => el("span", { title: uuids(i) || null }, devices(i)) },
  { head: "In flight", kind: "number", value: (i) => i.in_flight },
  { head: "Running", kind: "number", value: signal("num_requests_running") },
  { head: "Waiting", kind: "number", value: signal("num_requests_waiting") },
  { head: "KV cache", kind: "number", value: (i) => percent(i.signals?.kv_cache_usage) },
  { head: "Staged in, ms", kind: "number", value: (i) => number(i.stage_ms) },
  { head: "GB/s", kind: "number", value: (i) => (i.staging_gbps ? number(i.staging_gbps, 2) : "–") },
  { head: "Stall, ms", kind: "number", value: (i) => number(i.commit_ms, 2) },
  { head: "Error", value: (i) => (i.error ? `${i.error.message} [${i.error.code}]` : "") },
];

export class FleetView {
  constructor() {
    this.table = new Table(byId("instances"), COLUMNS, (i) => i.id, "No instance is registered.");
  }

  update(instances) {
    this.table.update([...instances].sort((a, b) => (a.id < b.id ? -1 : 1)));
  }
}

function devices(instance) {
  return (instance.devices ?? []).map((device) => device.index ?? device.uuid).join(", ") || "–";
}

function uuids(instance) {
  return (instance.devices ?? []).map((device) => [device.host, device.uuid].filter(Boolean).join(" ")).join(", ");
}

function percent(share) {
  return typeof share === "number" ? `${(share * 100).toFixed(0)} %` : "–";
}

// What the gateway makes of it: whether it gets requests, and the circuit breaker's state, unless all is well.
function health(instance) {
  const told = [];
  if (instance.answering === false) told.push("does not answer");
  if (instance.circuit && instance.circuit !== "closed") {
    const left = instance.ejected_for_s ? ` for ${number(instance.ejected_for_s)} s` : "";
    told.push(`circuit ${instance.circuit.replace("_", "-")}${left}`);
  }
  if (instance.draining) told.push("draining");
  if (!instance.eligible) told.push("gets no requests");
  return told.join(", ") || "good";
}
