"""How soon a release takes a bad version back: from the answer that makes the evidence enough to the last bad one.

Two instances serve a version whose answers a reward server scores with 1; a release gives half of the requests to one
whose answers score 0. Clients note when each answer came. Afterwards the same judgement (release/judge.py) is made of
what they saw, answer by answer: the first answer with which it finds harm is the moment of the evidence. From there the
clock runs to the commit that takes the version back, and to the last answer by it that a client got.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from loadtest.measure import run as shared
from server.cli.admin import AdminClient
from server.gateway.release.judge import Evidence, examine
from server.gateway.release.policy import parse
from server.gateway.release.statistics import NOTHING, Tally
from server.ports import free_port
from server.up.processes import Child
from server.up.server import Server

MODEL = "rollback"
CLIENTS = 4
VLLM_ARGS = ("--max-model-len", "64", "--dtype", "float32")
PHASES = ("commit_s", "last_answer_s")


def policy() -> str:
    """Half of the requests, until the reward shows harm."""
    condition = "{metric: reward/good, max_decrease: 0.05, least: 20}"
    steps = f"steps: [{{traffic: 50, for: 1h, conditions: [{condition}]}}]"
    return f"sticky: none\nrewards: {{good: {{}}}}\n{steps}\n"


class Clients:
    """Threads that ask without a pause. `answers` has (unix seconds, version) of each answer."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[float, int]] = []
        self.failed = 0
        self._url, self._stopped = url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the answers that are under way."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        body = {"model": MODEL, "prompt_token_ids": [3, 4, 5], "max_tokens": 4, "ignore_eos": True, "stream": False}
        with httpx.Client(base_url=self._url, timeout=60.0) as http:
            while not self._stopped.is_set():
                answer = http.post("/generate", json=body)
                if answer.status_code != 200:
                    self.failed += 1
                    continue
                version = int(answer.json()["choices"][0]["weight_versions"][-1]["version"])
                self.answers.append((time.time(), version))


def run(json: Path | None, *, releases: int = 8) -> dict[str, Any]:
    """Measure, print the table, and write the figures to `json`; returns them."""
    work = Path("runs") / "bench-rollback"
    work.mkdir(parents=True, exist_ok=True)
    good, bad = shared.saying(work, range(100, 102))
    port = free_port()
    rewards = work / "rewards.yaml"
    reward = {"kind": "regex", "name": "good", "pattern": "w100"}
    rewards.write_text(yaml.safe_dump({"port": port, "rewards": [reward]}))
    scoring = Child("rewards", ["trainer.rewards.server", "--config", str(rewards)], work / "rewards.log")
    options: dict[str, Any] = {"instances": 2, "kv_cache_gib": 0.1}
    options["gateway_args"] = ("--reward", f"good=http://127.0.0.1:{port}")
    try:
        with shared.up(good, MODEL, work / "state", VLLM_ARGS, **options) as server:
            rows = [one(server, bad, policy()) for _ in range(releases)]
    finally:
        scoring.stop()
    figures: dict[str, Any] = {
        phase: {"median": statistics.median(row[phase] for row in rows), "longest": max(row[phase] for row in rows)}
        for phase in PHASES
    }
    failed = sum(row["failed"] for row in rows)
    figures |= {"releases": rows, "clients": CLIENTS, "failed": failed}
    show(figures)
    return shared.with_machine(figures, json)


def one(server: Server, bad: Path, text: str) -> dict[str, Any]:
    """A release from its begin to its end."""
    client = AdminClient(server.state_dir)
    _until(lambda: [i["eligible"] for i in client.call("GET", "/admin/instances")["instances"]] == [True, True])
    version = client.call("POST", "/admin/weights", {"path": str(bad.resolve()), "activate": False})["version"]
    clients = Clients(server.url)
    try:
        client.call("POST", "/admin/releases", {"version": version, "text": text})
        _until(lambda: client.call("GET", "/admin/releases")["release"]["ended"])
        release = client.call("GET", "/admin/releases")["release"]
    finally:
        clients.stop()
    if release["state"] != "rolled_back":
        raise RuntimeError(f"the release ended as {release['state']}: {release['reason']}")
    committed = client.call("GET", "/admin/weights/active")["committed_at"]
    known = evidence_at(clients.answers, version, text)
    last = max(at for at, wrote in clients.answers if wrote == version)
    return {
        "commit_s": committed - known,
        "last_answer_s": last - known,
        "bad_answers": sum(wrote == version for _, wrote in clients.answers),
        "answers": len(clients.answers),
        "failed": clients.failed,
    }


def evidence_at(answers: list[tuple[float, int]], version: int, text: str) -> float:
    """Unix seconds of the first answer with which the judgement finds harm, were each known when its client has it."""
    policy_ = parse(text)
    condition, *_ = policy_.of_step(0)  # its own; the guards find nothing here
    began = min(at for at, wrote in answers if wrote == version)
    candidate = stable = NOTHING
    for at, wrote in sorted(answers):
        if at < began:
            continue  # before the step
        if wrote == version:
            candidate += Tally(1, 0.0, 0.0)
        else:
            stable += Tally(1, 1.0, 1.0)
        if examine(condition, Evidence(candidate, stable), policy_.alpha).state == "harmed":
            return at
    raise RuntimeError("the clients' answers are no evidence of harm")


def _until(condition: Any, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.05)


def show(figures: dict[str, Any]) -> None:
    """As a table."""
    table = Table("from the evidence to", "median, s", "longest, s", title=f"{len(figures['releases'])} releases")
    for phase, what in zip(PHASES, ("the commit of the rollback", "the last answer by the version"), strict=True):
        table.add_row(what, f"{figures[phase]['median']:.2f}", f"{figures[phase]['longest']:.2f}")
    Console().print(table)
    Console().print(f"failed requests: {figures['failed']}", highlight=False)
