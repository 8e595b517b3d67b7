"""How long a colocated step takes to change phases, and what trainer and server then hold of the memory.

A real server (gateway and one vLLM instance) and a real GRPO run share a budget that has room for one of them. Times
come from the trainer's own metrics, resident memory from looking at all processes a few times a second. For comparison
the same run without a section `memory`, which holds everything at all times.

    rollout    the trainer's state goes to the disk, the instance wakes and catches up with the active version
    inference  the instance goes to sleep, the models come back
    train      the optimizer's state comes back

hotswap bench phases [--level 1|2] [--small]
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import psutil
import yaml
from rich.console import Console
from rich.table import Table

from loadtest.measure.processes import tree
from loadtest.measure.run import up, with_machine
from server.errors import RequestFailed
from server.up.server import Server
from trainer.memory.ledger import GIB
from trainer.tiny_model import tiny_run

SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
"""About 57 M parameters: 0.9 GB of weights, gradients and Adam's states in fp32."""
KV_CACHE_GIB = 0.5
LOOK_S = 0.2
PHASES = ("rollout", "inference", "train")
MODEL = "phases"


@dataclass
class Resident:
    """Private resident bytes of both sides, a few times a second."""

    trainer: list[int] = field(default_factory=list)
    serving: list[int] = field(default_factory=list)

    def look(self, trainer: int, serving: int) -> None:
        self.trainer.append(_private(trainer))
        self.serving.append(_private(serving))

    @property
    def peak_together(self) -> int:
        """Of the two added up at one time."""
        return max(map(sum, zip(self.trainer, self.serving, strict=True)), default=0)


def run(json: Path | None, *, level: int, steps: int, small: bool) -> dict[str, Any]:
    """Measure, print a table, write JSON if asked; returns the figures. Raises RequestFailed when a run fails."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # not memory, as /tmp may be
        model = _model(Path(directory), small=small)
        figures: dict[str, Any] = {"level": level, "steps": steps, "small": small}
        figures["shared"] = _measure(Path(directory) / "shared", model, steps, level)
        figures["all at once"] = _measure(Path(directory) / "at-once", model, steps, None)
    _show(figures)
    return with_machine(figures, json)


def _model(root: Path, *, small: bool) -> Path:
    from trainer.tiny_model import write_tiny_model

    write_tiny_model(root / "model", **({} if small else SHAPE))
    return root / "model"


def _measure(root: Path, model: Path, steps: int, level: int | None) -> dict[str, Any]:
    root.mkdir()
    vllm = ("--max-model-len", "256", "--max-num-seqs", "64", "--dtype", "float32")
    with up(model, MODEL, root / "state", vllm, kv_cache_gib=KV_CACHE_GIB) as server:
        resident = _train(server, _configuration(root, model, server, steps, level))
    events = [orjson.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return _figures([e for e in events if e["event"] == "step"], resident)


def _configuration(root: Path, model: Path, server: Server, steps: int, level: int | None) -> Path:
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"kind": "arithmetic"},
        "algorithm": {"name": "grpo", "samples_per_prompt": 4, "kl_coef": 0.01},
        "steps": steps,
        "batch": 4,
        "micro_batch": 8,
        "gateway": {"url": server.url},
        "publish": {"model": MODEL, "store": server.store, "dtype": "float32"},
        "metrics": str(root / "metrics.jsonl"),
    }
    if level is not None:
        serving: dict[str, Any] = {"admin_url": server.admin_url, "level": level}
        serving["admin_key_file"] = str(server.admin_key_file)
        budget = _budget_gib(model)
        # The engine is said to take all of it, so that nothing of the trainer can stay.
        serving |= {"kv_cache_gib": KV_CACHE_GIB, "engine_gib": budget - KV_CACHE_GIB}
        config["memory"] = {"budget_gib": budget, "directory": str(root), "serving": serving}
    (root / "run.yaml").write_text(yaml.safe_dump(tiny_run(config)))
    return root / "run.yaml"


def _budget_gib(model: Path) -> float:
    """Memory of the phase that needs most: training, with weights, gradients and two moments, or serving."""
    from trainer.megatron.hf_config import load_shape

    weights = load_shape(model).parameters * 4
    return max(4 * weights * 1.02, weights + KV_CACHE_GIB * GIB) / GIB


def _train(server: Server, config: Path) -> Resident:
    resident = Resident()
    trainer = server.train(config)
    instance = server.children["instance-0"].process.pid
    with _watched(resident, trainer.process.pid, instance):
        code = trainer.process.wait()
    if code != 0:
        raise RequestFailed(f"the trainer ended with {code}; the end of its log:\n{trainer.tail()}")
    return resident


@contextmanager
def _watched(resident: Resident, trainer: int, serving: int) -> Iterator[None]:
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(LOOK_S):
            resident.look(trainer, serving)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _private(pid: int) -> int:
    """Of a process and all it has started; 0 when it is gone."""
    total = 0
    try:
        for process in tree(pid):
            info = process.memory_info()
            total += info.rss - info.shared
    except psutil.Error:
        pass
    return total


def _figures(steps: list[dict[str, Any]], resident: Resident) -> dict[str, Any]:
    """Of the steps after the first, which has nothing to bring back."""
    later = steps[1:] or steps
    names = sorted(name for name in set(itertools.chain(*later)) if name.startswith("memory_ms/"))
    switches = {name: round(median(s.get(name, 0.0) for s in later), 1) for name in names}
    return {
        "switch_ms": switches,
        "step_ms": round(median(s["step_ms"] for s in later), 1),
        "rollout_ms": round(median(s["rollout_ms"] for s in later), 1),
        "train_ms": round(median(s["train_ms"] for s in later), 1),
        "peak_mb": {
            "trainer": _mb(max(resident.trainer, default=0)),
            "serving": _mb(max(resident.serving, default=0)),
            "together": _mb(resident.peak_together),
        },
        "asleep_mb": _mb(_asleep(resident.serving)),
    }


def _asleep(serving: list[int]) -> int:
    """The median of what is below a quarter of the peak: an engine is far above, a process that starts over below."""
    return int(median([n for n in serving if 0 < n < max(serving) / 4] or [0]))


def _mb(nbytes: int) -> int:
    return round(nbytes / 2**20)


def _show(figures: dict[str, Any]) -> None:
    table = Table("", *PHASES, "step", "peak trainer", "peak serving", "peak together", title="ms, MB")
    for name in ("shared", "all at once"):
        f = figures[name]
        switches = [f"{f['switch_ms'].get(f'memory_ms/{phase}', 0.0):,.0f}" for phase in PHASES]
        table.add_row(name, *switches, f"{f['step_ms']:,.0f}", *(str(f["peak_mb"][k]) for k in f["peak_mb"]))
    console = Console()
    console.print(table)
    console.print(f"asleep, the instance holds {figures['shared']['asleep_mb']} MB")
