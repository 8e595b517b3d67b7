"""`python -m loadtest.demo.learn`, which `make demo-learn` is: a server learns from its users, and is not misled.

    serve     a model that was fine-tuned on wrong sums, on two instances; simulated users ask it, rate its answers, and
              correct those that are wrong
    train     on the corrections, out of the gateway's log of answers
    release   the result takes over step by step: a policy judges it by a reward, by the users' thumbs and by errors
    hack      another version was trained on a reward that pays for sevens; the same policy takes it back

The users go on asking all the while. Exit status: 0 all went well, 1 a promise was not kept, 130 interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from loadtest.demo.recipe import LARGEST_DIGIT, prepare_environment
from loadtest.demo.stage import DemoFailed
from loadtest.measure.run import up, with_machine
from server.cli.admin import AdminClient
from server.errors import CliError
from server.ports import free_port
from server.up import interrupts
from server.up.processes import Child
from server.up.server import Server
from trainer.tiny_model import tiny_run

MODEL = "demo-learn"
USERS = 3
ENGINE = ("--dtype", "float32", "--max-model-len", "64")
SUMS = [f"{a}+{b}+{c}=" for a, b, c in itertools.product(range(LARGEST_DIGIT + 1), repeat=3)]
CORRECTIONS = 400  # that users have made before anything is trained
LEAST_GAIN = 20.0  # points of right answers that users see, by the version that was trained on them
WAIT_S = 240.0
REWARD = "correct"
# First nobody sees its answers, then some do, then half.
POLICY = f"""
sticky: none
conditions:
  - {{metric: errors, max_increase: 0.05}}
  - {{metric: reward/{REWARD}, max_decrease: 0.1, prove: true, least: 40}}
rewards:
  {REWARD}: {{expected: answer}}
steps:
  - {{traffic: 0, shadow: 100, for: 2s}}
  - {{traffic: 20, for: 2s}}
  - {{traffic: 50, for: 2s, conditions: [{{metric: feedback, max_decrease: 0.15}}]}}
"""


@dataclass
class Seen:
    """Answers that users saw, and right ones, by version; times are monotonic seconds."""

    answers: Counter[int] = field(default_factory=Counter)
    right: Counter[int] = field(default_factory=Counter)
    corrections: int = 0
    lost: int = 0
    first_problem: str = ""
    first_at: dict[int, float] = field(default_factory=dict)
    last_at: dict[int, float] = field(default_factory=dict)

    def accuracy(self, version: int) -> float:
        """Of all answers by that version; 0 where there was none."""
        return self.right[version] / max(1, self.answers[version])


class Users:
    """Threads that ask sums, rate what they get and correct it, until `stop`."""

    def __init__(self, url: str) -> None:
        self.seen, self._url, self._stopped, self._lock = Seen(), url, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask_on, args=(n,), daemon=True) for n in range(USERS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the answers that are under way."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(30)

    def _ask_on(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60.0) as http:
            for question in itertools.cycle(SUMS[number::USERS]):
                if self._stopped.is_set():
                    return
                try:
                    self._ask(http, question)
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    with self._lock:
                        self.seen.lost += 1
                        self.seen.first_problem = self.seen.first_problem or f"{question} {error!r}"

    def _ask(self, http: httpx.Client, question: str) -> None:
        right = f"{sum(int(n) for n in question.rstrip('=').split('+')):02d}"
        body = {"model": MODEL, "prompt": question, "max_tokens": 4, "temperature": 1.0, "metadata": {"answer": right}}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        said, version = answer["choices"][0]["text"].strip(), int(answer["choices"][0]["weight_versions"][0]["version"])
        word = {"rating": "up"} if said == right else {"rating": "down", "correction": right}
        http.post("/v1/feedback", json={"id": answer["id"], **word}).raise_for_status()
        with self._lock:
            now, seen = time.monotonic(), self.seen
            seen.answers[version] += 1
            seen.right[version] += said == right
            seen.corrections += said != right
            seen.first_at.setdefault(version, now)
            seen.last_at[version] = now


class LearnDemo:
    """One run in directory `run`. Call `close` whatever happens."""

    def __init__(self, run: Path, console: Console, seed: int = 0) -> None:
        self.run_dir, self._console, self._seed = run.resolve(), console, seed
        self.server: Server | None = None
        self._rewards: Child | None = None
        self.users: Users | None = None
        self.releases: dict[int, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def run(self) -> None:
        """All phases. Raises DemoFailed."""
        self._phase("serve")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._call("trainer.tiny_model", str(self.run_dir / "random"))
        wrong = {"kind": "arithmetic", "operands": 3, "largest": LARGEST_DIGIT, "noise": 0.8, "mistake": "off_by_one"}
        self._train("taught-wrong", "random", wrong, steps=120)
        self._serve()
        self._phase("collect")
        seen = self._users.seen
        self._until("corrections", lambda: seen.corrections >= CORRECTIONS)
        time_to_close = 3.0  # segments of the log are closed every two seconds
        self._until("the log", lambda: time.monotonic() > self.seconds_at("collect") + time_to_close)
        self._phase("train")
        answers = self._server.state_dir / "answers"
        self._train("taught-right", "taught-wrong", {"kind": "answers", "path": str(answers)}, steps=150)
        self._phase("release")
        self._release(self.run_dir / "taught-right")
        self._phase("hack")
        hacked = self.run_dir / "sevens.jsonl"
        hacked.write_text("".join(json.dumps({"prompt": question, "target": "77"}) + "\n" for question in SUMS))
        self._train("hacked", "taught-right", {"kind": "jsonl", "path": str(hacked)}, steps=40)
        self._release(self.run_dir / "hacked")
        self._phase("done")
        self._users.stop()

    def close(self) -> None:
        """End every process."""
        if self.users is not None:
            self.users.stop()
        if self._rewards is not None:
            self._rewards.stop()
        if self.server is not None:
            self.server.stop()

    def shortcomings(self) -> list[str]:
        """Promises of the demo that this run did not keep; none, as a rule."""
        seen, found = self._users.seen, []
        good, bad = self.releases.get(2, {}), self.releases.get(3, {})
        if good.get("state") != "done":
            found.append(f"the version that learned from corrections was not released: {good.get('reason')}")
        if bad.get("state") != "rolled_back":
            found.append("the version that was trained on a wrong reward was not taken back")
        gain = 100 * (seen.accuracy(2) - seen.accuracy(1))
        if gain < LEAST_GAIN:
            found.append(f"corrections brought {gain:+.1f} points, fewer than {LEAST_GAIN:.0f}")
        if seen.lost:
            found.append(f"users lost {seen.lost} requests; the first: {seen.first_problem}")
        return found

    def figures(self) -> dict[str, Any]:
        """Of a run that is over."""
        seen = self._users.seen
        versions = {
            version: {"answers": seen.answers[version], "right": round(seen.accuracy(version), 4)}
            for version in sorted(seen.answers)
        }
        told = {v: {k: r[k] for k in ("state", "reason", "step", "steps")} for v, r in self.releases.items()}
        return {
            "seconds": round(self.seconds["done"], 1), "seconds_at": self.seconds,
            "corrections": seen.corrections, "versions": versions, "releases": told, "lost": seen.lost,
        }  # fmt: skip

    def seconds_at(self, phase: str) -> float:
        """Monotonic seconds when it began."""
        return self._began + self.seconds[phase]

    @property
    def _server(self) -> Server:
        assert self.server is not None
        return self.server

    @property
    def _users(self) -> Users:
        assert self.users is not None
        return self.users

    def _phase(self, name: str) -> None:
        self.seconds[name] = round(time.monotonic() - self._began, 1)
        self._console.print(f"[bold]{self.seconds[name]:6.1f} s  {name}[/bold]")

    def _serve(self) -> None:
        port = free_port()
        rewards = self.run_dir / "rewards.yaml"
        rewards.write_text(yaml.safe_dump({"port": port, "rewards": [{"kind": "exact_match", "name": REWARD}]}))
        self._rewards = Child(
            "rewards", ["trainer.rewards.server", "--config", str(rewards)], self.run_dir / "rewards.log"
        )
        collects = ("--collect-anonymous", "--answers-segment", "2", "--reward", f"{REWARD}=http://127.0.0.1:{port}")
        try:
            with interrupts.held():
                self.server = up(
                    self.run_dir / "taught-wrong", MODEL, self.run_dir / "state", ENGINE,
                    instances=2, kv_cache_gib=0.1, gateway_args=collects,
                )  # fmt: skip
                self.server.start()
            self.server.wait_ready(timeout_s=WAIT_S)
        except CliError as error:
            raise DemoFailed("serve", str(error)) from error
        client = AdminClient(self.server.state_dir)

        def both() -> bool:
            return [i["eligible"] for i in client.call("GET", "/admin/instances")["instances"]] == [True, True]

        self._until("both instances", both)
        self.users = Users(self.server.url)

    def _train(self, name: str, of: str, data: dict[str, Any], steps: int) -> None:
        config = {
            "model": {"path": str(self.run_dir / of)}, "algorithm": {"name": "sft"}, "data": data, "steps": steps,
            "batch": 64, "optimizer": {"lr": 2e-3, "warmup_steps": 10, "decay": "cosine"}, "seed": self._seed,
            "save_to": str(self.run_dir / name), "metrics": str(self.run_dir / f"{name}.jsonl"),
        }  # fmt: skip
        path = self.run_dir / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tiny_run(config), sort_keys=False))
        self._call("trainer.main", "--config", str(path))

    def _release(self, checkpoint: Path) -> None:
        client = AdminClient(self._server.state_dir)
        version = client.call("POST", "/admin/weights", {"path": str(checkpoint), "activate": False})["version"]
        release = client.call("POST", "/admin/releases", {"version": version, "text": POLICY})
        place = ""

        def ended() -> bool:
            nonlocal release, place
            release = client.call("GET", "/admin/releases")["release"]
            now = f"version {version}, step {release['step'] + 1} of {release['steps']}: {release['state']}"
            if now != place and release["state"] != "evaluating":
                place = now
                why = f" ({release['reason']})" if release["reason"] else ""
                self._console.print(f"          {now}{why}", highlight=False)
            return bool(release["ended"])

        self._until(f"the release of version {version}", ended)
        self.releases[version] = release

    def _call(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoFailed(module, f"it ended with {done.returncode}:\n{(done.stderr or done.stdout)[-2000:]}")

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise DemoFailed(what, f"it took over {WAIT_S:g} s")
            for child in self.server.children.values() if self.server is not None else ():
                if not child.alive and child.name != "publish":
                    raise DemoFailed(what, f"{child.name} has ended; the end of {child.log}:\n{child.tail()}")
            time.sleep(0.2)


def show(demo: LearnDemo, console: Console) -> None:
    """The table of what users saw, by version."""
    assert demo.users is not None
    names = {1: "fine-tuned on wrong sums", 2: "trained on the users' corrections", 3: "trained on a wrong reward"}
    ends: dict[int, str] = defaultdict(lambda: "served first")
    ends |= {version: release["state"].replace("_", " ") for version, release in demo.releases.items()}
    table = Table("version", "", "answers that users got", "right", "its release")
    for version, name in names.items():
        seen = demo.users.seen
        right = f"{seen.accuracy(version):.1%}" if seen.answers[version] else ""
        table.add_row(str(version), name, str(seen.answers[version]), right, ends[version])
    console.print(table)
    if 3 in demo.releases:
        console.print(f"version 3 was taken back: {demo.releases[3]['reason']}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.demo.learn", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo-learn"), help="where models and logs go")
    parser.add_argument("--json", type=Path, help="also write the run's figures here")
    parser.add_argument("--seed", type=int, default=0, help="of the trainings")
    parsed = parser.parse_args(arguments)
    prepare_environment()
    interrupts.install()
    console = Console()
    demo = LearnDemo(parsed.dir, console, parsed.seed)
    try:
        demo.run()
    except DemoFailed as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        demo.close()
    show(demo, console)
    with_machine(demo.figures(), parsed.json)
    problems = demo.shortcomings()
    for problem in problems:
        console.print(f"error: {problem}", highlight=False, markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
