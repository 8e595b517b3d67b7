"""One architecture: a tiny checkpoint, swaps and a rollback by pointers and by copies, and what came of it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from pydantic import ValidationError

from loadtest.architectures.tiny import NoCheckpoint, make_versions
from loadtest.forks import fork

Outcome = Literal["proven", "refused", "wrong", "not started", "no checkpoint"]
WAYS = ("pointed", "copied")
LIMIT_S = 400
LIMIT_BYTES = 8 << 30
OURS = str(Path(__file__).parents[2] / "weightsync")


@dataclass
class Trial:
    """`refused`: by Hotswap, with an error that says why; `not started`: by vLLM itself, without Hotswap."""

    architecture: str
    outcome: Outcome
    reason: str = ""
    family: str = ""
    tensors: int = 0
    model: str = ""
    ways: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def attempt(architecture: str) -> Trial:
    """In this process."""
    from loadtest.models.equality import flipping, swap
    from loadtest.models.vllm_worker import worker
    from weightsync import Publisher
    from weightsync.store import SyncStore

    trial = Trial(architecture, "proven")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hotswap-architecture-") as name:
        directory = Path(name)
        try:
            versions = make_versions(directory / "model", architecture)
        except NoCheckpoint as error:
            return Trial(architecture, "no checkpoint", str(error))
        trial.tensors = len(versions[0])
        for way in WAYS:
            arena = directory / way
            arena.mkdir(mode=0o700)
            with patch.dict(os.environ, {"HOTSWAP_ARENA": str(arena)}), contextlib.ExitStack() as stack:
                store = f"sqlite://{directory}/{way}.db"
                SyncStore(store).close()
                publisher = stack.enter_context(Publisher(store, model="demo", lease_ttl_s=LIMIT_S))
                try:
                    stack.enter_context(flipping(way))
                    w = stack.enter_context(worker(directory / "model", runner=runner(architecture)))
                    trial.model = type(w.model).__name__
                    wrong = [f"{step}: {', '.join(f[:8])}" for step, f in swap(w, publisher, versions, way) if f]
                except Exception as error:
                    trial.outcome, trial.reason = _sorted(error)
                    trial.ways[way] = trial.outcome
                    if os.environ.get("VERBOSE"):
                        traceback.print_exc()
                    return trial
                if wrong:
                    trial.outcome, trial.reason = "wrong", f"{way}: {'; '.join(wrong)}"
                trial.ways[way] = "wrong" if wrong else "proven"
    return trial


FAMILIES = {
    "_TEXT_GENERATION_MODELS": "text",
    "_MULTIMODAL_MODELS": "images and sound",
    "_TRANSFORMERS_SUPPORTED_MODELS": "run by transformers",
    "_TRANSFORMERS_BACKEND_MODELS": "run by transformers",
    "_SPECULATIVE_DECODING_MODELS": "draft models and heads",
}
"""Of vLLM's registry; what is in no other one is a pooling model."""


def registered() -> list[str]:
    """Every architecture that vLLM knows."""
    from vllm.model_executor.models import ModelRegistry

    return sorted(ModelRegistry.get_supported_archs())


def family_of(architecture: str) -> str:
    from vllm.model_executor.models import registry

    return next((name for kind, name in FAMILIES.items() if architecture in getattr(registry, kind)), "pooling")


def runner(architecture: str) -> str:
    """vLLM's for it: names of embedding models are names of models that generate, too."""
    from vllm.model_executor.models import registry

    pools = family_of(architecture) == "pooling" and architecture in registry._EMBEDDING_MODELS
    return "pooling" if pools else "auto"


def _sorted(error: Exception) -> tuple[Outcome, str]:
    *_, last = traceback.extract_tb(error.__traceback__)
    what = str(error) or f"`{last.line}` in {Path(last.filename).name}"
    text = f"{type(error).__name__}: {what}"
    if isinstance(error, ValidationError):  # pydantic's: its own text has all arguments in it
        text = "; ".join(found["msg"] for found in error.errors())
    if isinstance(error, AssertionError) and error.args and isinstance(error.args[0], dict):  # of a staging
        return "refused", str(error.args[0]["message"])
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return ("refused" if any(f.startswith(OURS) for f in files) else "not started"), text


def forked(architecture: str, log: Path) -> Trial:
    """In a process of its own: a crash, a hang or too much memory ends that one alone."""
    began = time.monotonic()
    read, write = os.pipe()
    child = fork(lambda: _child(architecture, read, write, log))
    os.close(write)
    answer = b""
    with _alarm(child), os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        trial = Trial(**json.loads(answer))
    else:
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        took = time.monotonic() - began
        limit = f" after the limit of {LIMIT_S} s" if took > LIMIT_S else ""
        trial = Trial(architecture, "not started", f"its process ended: {how}{limit}")
    trial.family = family_of(architecture)
    trial.seconds = round(time.monotonic() - began, 1)
    return trial


@contextlib.contextmanager
def _alarm(child: int) -> Iterator[None]:
    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _child(architecture: str, read: int, write: int, log: Path) -> None:
    os.close(read)
    gc.freeze()  # of the parent's garbage some (gRPC's) waits for threads as it goes, which are not here
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    trial = attempt(architecture)
    os.write(write, json.dumps(asdict(trial)).encode())


def warm() -> None:
    """Import what every trial needs, so that a fork has it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # PyPI's torchvision is built for CUDA. Image processors need its Python part, which works without operators.
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
    import transformers  # noqa: F401
    import vllm.engine.arg_utils  # noqa: F401
    from vllm.model_executor.models import registry

    import loadtest.models.equality  # noqa: F401

    registry._run_in_subprocess = lambda function: function()  # we are in one
    from vllm.plugins import load_general_plugins

    load_general_plugins()
