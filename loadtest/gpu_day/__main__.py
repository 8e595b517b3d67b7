"""Run the GPU day, or phases of it: `python -m loadtest.gpu_day [WHAT...] [--json FILE]`.

WHAT is a call of the schedule (`call-1`) or a phase (`flip`; `undo:small` for tiny shapes); left out, all calls, one
behind the other. Each check prints one JSON line as it is found. Exit status 1: something failed or was not begun.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Before torch is asked: it looks for devices through NVML then, and not with a context that no fork could use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import numpy as np
import torch

from loadtest.gpu_day.calls import CALLS, Call, Day, Step, plan, summary
from loadtest.gpu_day.device import Device
from loadtest.gpu_day.hardware import nvidia_smi, there
from loadtest.gpu_day.report import FAILED, Check, Report, collect
from loadtest.measure.machine import machine
from server.up import interrupts
from weightsync.format import fingerprint

LIMIT_S = 480.0  # of a phase that is asked for by itself
PHASES = {
    "env": "hardware", "flip": "flips", "tied": "flips", "undo": "flips", "race": "flips",
    "memory": "stagings", "stage": "stagings", "checksum": "stagings", "remap": "hardware",
    "serve-small": "serving", "streams-small": "streams", "serve-fp8": "serving", "serve-8b": "serving",
    "streams-8b": "streams",
}  # fmt: skip
"""And the modules that they are in."""
WITHOUT_VLLM = [name for name, module in PHASES.items() if module not in ("serving", "streams")]
BACKENDS = {"FlashInfer": "flashinfer", "DeepGEMM": "deep_gemm"}
"""Libraries that vLLM uses where they are installed, and that lay weights out in a way of their own."""


def run(phase: str, small: bool, work: Path | None = None, logs: Path | None = None) -> list[Check]:
    """The checks of one phase, in this process."""
    report = Report(phase, work, logs) if work is not None else Report(phase)
    with report.running():
        module = importlib.import_module(f"loadtest.gpu_day.{PHASES[phase]}")
        found: Callable[[Report, Device, bool], None] = getattr(module, phase.replace("-", "_"))
        found(report, Device(), small)
    return report.checks


def _run_step(small: bool, work: Path, logs: Path, step: Step) -> None:
    run(step.phase, small or step.small, work, logs)


def _warm(calls: Iterable[Call]) -> None:
    """Load the kernels of checksums, if a phase wants them: each fork would do so anew, for seconds."""
    if any(step.phase in WITHOUT_VLLM for call in calls for group in call.groups for chain in group for step in chain):
        fingerprint.warm()
        fingerprint.rows(
            np.zeros(1, np.int16), 1, fingerprint.row_multipliers(0, 1), fingerprint.column_multipliers(0, 1)
        )


def about(small: bool) -> dict[str, Any]:
    """Hardware and versions that the figures belong to, and backends of vLLM that they say nothing of."""
    cuda = torch.cuda.is_available()
    device = nvidia_smi().get("name", "unknown") if cuda else "cpu"
    missing = [name for name, module in BACKENDS.items() if not there(module)]
    return {"machine": machine(), "device": device, "cuda": torch.version.cuda, "small": small,
            "backends_not_measured": missing}  # fmt: skip


def chosen(what: Sequence[str], limit_s: float) -> dict[str, Call]:
    """Calls by name; phases are one call, in which one runs behind the other. Raises ValueError."""
    calls, steps = dict[str, Call](), list[Step]()
    for name in what or CALLS:
        phase, _, small = name.partition(":")
        if name in CALLS:
            calls[name] = CALLS[name]
        elif phase in PHASES and small in ("", "small"):
            steps.append(Step(phase, 0.0, limit_s, small=bool(small)))
        else:
            raise ValueError(f"{name} is no call and no phase: say one of {', '.join([*CALLS, *PHASES])}")
    return calls | ({"phases": Call(((tuple(steps),),))} if steps else {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_day", description=__doc__)
    parser.add_argument("what", nargs="*", help=f"calls or phases: {', '.join([*CALLS, *PHASES])}")
    parser.add_argument("--json", type=Path, help="write checks, hardware and versions here, and logs beside it")
    parser.add_argument("--work", type=Path, default=Path("runs") / "gpu-day", help="for checkpoints and logs")
    parser.add_argument(
        "--small", action=argparse.BooleanOptionalAction, help="tiny shapes; the default where there is no CUDA"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a phase that is asked for by itself")
    parser.add_argument("--slower", type=float, default=1.0, help="stretches the limits, for less than an H200")
    parser.add_argument("--began", type=float, help="when the first call began, as Python's time.monotonic tells it")
    parser.add_argument("--plan", action="store_true", help="print what would run when, and end")
    options = parser.parse_args(argv)
    try:
        calls = chosen(options.what, options.limit)
    except ValueError as error:
        parser.error(str(error))
    if options.plan:
        print("\n".join(plan(calls)))
        return 0
    small = options.small if options.small is not None else not torch.cuda.is_available()
    work, told, found = options.work.absolute(), about(small), dict[str, dict[str, Any]]()
    known: dict[str, int] = {}
    _warm(calls.values())

    def tell(outcomes: dict[str, dict[str, Any]]) -> None:
        for phase, outcome in outcomes.items():
            for check in outcome["checks"][known.get(phase, 0) :]:
                print(json.dumps(check), flush=True)
            known[phase] = len(outcome["checks"])
        if options.json is not None:
            collect(options.json, told, outcomes)

    began = options.began
    for name, call in calls.items():
        archive = options.json.with_name(f"{options.json.stem}-{name}.tar.gz") if options.json is not None else None
        began = began if began is not None else time.monotonic()
        logs = work / "logs" / name
        day = Day(logs, partial(_run_step, small, work, logs), tell, archive, began, options.slower)
        found |= day.run(call)
        began = None
    print("\n".join(["", *summary(found)]), flush=True)
    return 1 if any(outcome["status"] == FAILED for outcome in found.values()) else 0


if __name__ == "__main__":
    interrupts.install()
    sys.exit(main())
