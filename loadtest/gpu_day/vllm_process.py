"""One vLLM engine in a process of its own: what it answers when it is stock, and when its weights are swapped.

`python -m loadtest.gpu_day.vllm_process QUESTION ANSWER`, both JSON files. A stock engine loads one checkpoint itself
and answers; a swapped one begins with dummy weights and answers after each step of `SWAPPED`. Every prompt is asked
alone, and without a prefix cache, so that both compute the same batches: then tokens and log-probabilities are equal to
the bit, or the weights are not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TOKENS, LOGPROBS = 24, 4
SWITCHES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
STAGE_POLL_S = 0.01
Answers = list[dict[str, Any]]


class EngineFailed(Exception):
    """The process of an engine has ended, or did not stage a version; the message has its last words."""


def ask(question: dict[str, Any], log: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Ask an engine in a new process. Returns its answer and its `seconds`; its log stays. Raises EngineFailed."""
    switches = SWITCHES | ({"VLLM_PLUGINS": ""} if question["kind"] == "stock" else {})
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        asked, answered = (Path(directory) / name for name in ("question", "answer"))
        asked.write_text(json.dumps(question))
        command = [sys.executable, "-m", "loadtest.gpu_day.vllm_process", str(asked), str(answered)]
        with log.open("wb") as file:
            env = {**os.environ, **switches, **environment}
            process = subprocess.run(command, stdout=file, stderr=file, env=env, check=False)
        if process.returncode or not answered.exists():
            tail = log.read_text(errors="replace")[-1500:]
            raise EngineFailed(f"the {question['kind']} engine ended with status {process.returncode}:\n{tail}")
        return {**json.loads(answered.read_text()), "seconds": time.monotonic() - begun}


SWAPPED = {"first": 0, "second": 1, "rollback": 0, "failed flip": 0, "again": 1, "while staged": 1, "third": 0}
"""The steps of a swapped engine, and which of the checkpoints must answer after each."""
ASLEEP = {"woken": 0, "swapped awake": 1}


def _answers(llm: Any, prompts: list[list[int]]) -> Answers:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=LOGPROBS, prompt_logprobs=1)
    found = []
    for prompt in prompts:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        said = output.outputs[0]
        found.append({
            "tokens": list(said.token_ids),
            "logprobs": [_values(place) for place in said.logprobs],
            "prompt_logprobs": [_values(place) for place in output.prompt_logprobs if place is not None],
        })  # fmt: skip
    return found


def _values(place: Any) -> list[list[float]]:
    return [[int(token), float(seen.logprob)] for token, seen in sorted(place.items())]


def _engine(model: str, options: dict[str, Any], **more: Any) -> Any:
    from vllm import LLM

    return LLM(model, enable_prefix_caching=False, **options, **more)


class Swapped:
    """A vLLM engine in this process, with Hotswap's backend in its worker."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from weightsync.vllm_plugin import OWNER_ENV, register

        os.environ[OWNER_ENV] = str(os.getpid())  # an instance's dummy weights, which spare what a checkpoint may lack
        register()  # where the package is not installed, vLLM does not find the plug-in
        workers = "weightsync.vllm_engine.backend.WorkerMethods"
        config = {"backend": "hotswap"}
        self.llm = _engine(
            model, options, load_format="dummy", weight_transfer_config=config, worker_extension_cls=workers
        )
        self._core = self.llm.llm_engine.engine_core.engine_core
        self._call("init_weight_transfer_engine", {"schema": [], "allow_non_finite": False})
        self._call("hotswap_attach", {})

    def _call(self, method: str, *args: Any) -> Any:
        (answer,) = self.llm.collective_rpc(method, args=args)
        return answer

    def stage(self, record: Any) -> dict[str, Any]:
        """Raises EngineFailed."""
        order = {"version": record.version, "slot": record.slot, "manifest_digest": record.manifest_digest}
        report = self._call("hotswap_stage", order)
        while report["running"]:
            time.sleep(STAGE_POLL_S)
            report = self._call("hotswap_report")
        if report["error"] is not None:
            raise EngineFailed(f"version {record.version} was not staged: {report['error']['message']}")
        return dict(report)

    def commit(self, version: int) -> dict[str, float]:
        """The engine's own times, and the time until the device was done."""
        import torch

        started = time.perf_counter()
        found = self._core.hotswap_commit(version)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        done = (time.perf_counter() - started) * 1e3
        return {"flip_ms": found["flip_ms"], "commit_ms": found["commit_ms"], "done_ms": done}

    def vacate(self) -> float:
        """Give the buffers of versions back; the GB that this process has less on the device then."""
        import torch

        before = torch.cuda.memory_allocated()
        self._call("hotswap_vacate")
        return (before - torch.cuda.memory_allocated()) / 1e9

    def break_staged(self) -> None:
        """Have the flip of what is staged fail behind its tensors."""
        from loadtest.gpu_day import engine

        worker = self._core.model_executor.driver_worker.worker
        staged = worker.weight_transfer_engine._stager.bundle
        engine.breaks(staged.pieces[engine.BASE].generation)


def _swap(question: dict[str, Any]) -> dict[str, Any]:
    """Follows the steps; one that fails ends them, and what was answered before is kept."""
    swapping = Swapping(question)
    with _published(question["models"]) as publish:
        try:
            swapping.follow(publish)
            if question["sleeps"]:
                swapping.sleep(publish)
        except Exception as error:  # vLLM's, of whatever kind
            traceback.print_exc()
            swapping.figures["error"] = f"{type(error).__name__}: {error}"
    return {"answers": swapping.found, "figures": swapping.figures | _memory()}


class Swapping:
    """Takes the engine through its steps, and keeps its answers after each one and figures of them."""

    def __init__(self, question: dict[str, Any]) -> None:
        self._side = Swapped(question["models"][0], question["options"])
        self._prompts = question["prompts"]
        self.found: dict[str, Answers] = {}
        self.figures: dict[str, Any] = {}

    def _answer(self, step: str) -> None:
        self.found[step] = _answers(self._side.llm, self._prompts)

    def _swap(self, record: Any, step: str) -> int:
        report = self._side.stage(record)
        self.figures[f"{step}_staging_gbps"], self.figures["path"] = report["staging_gbps"], report["path"]
        self.figures[f"{step}_flip"] = self._side.commit(record.version)
        self._answer(step)
        return int(record.version)

    def follow(self, publish: Any) -> None:
        from loadtest.gpu_day import engine

        first = self._swap(publish(0), "first")
        self._swap(publish(1), "second")
        self.figures["rollback_flip"] = self._side.commit(first)
        self._answer("rollback")
        record = publish(1)
        self._side.stage(record)
        self._side.break_staged()
        try:
            self._side.commit(record.version)
        except engine.FlipRefused as error:
            self.figures["failed_flip"] = str(error)
        self._answer("failed flip")
        self._swap(publish(1), "again")
        record = publish(0)
        self._side.stage(record)
        self._answer("while staged")
        self.figures["third_flip"] = self._side.commit(record.version)
        self._answer("third")

    def sleep(self, publish: Any) -> None:
        """In place, as an instance does that was started with `--enable-sleep-mode`: buffers go first."""
        self.figures["vacated_gb"] = self._side.vacate()
        self._side.llm.sleep(level=1)
        self.figures["asleep_gb"] = _used_gb()
        self._side.llm.wake_up()
        self.figures["awake_gb"] = _used_gb()
        self._answer("woken")
        self._swap(publish(1), "swapped awake")


def _used_gb() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def _memory() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"allocated_gb": torch.cuda.memory_allocated() / 1e9, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


@contextlib.contextmanager
def _published(models: list[str]) -> Iterator[Any]:
    """A store, an arena, and a function that publishes one of the checkpoints."""
    from loadtest.gpu_day import engine
    from loadtest.models.equality import tensors_of
    from weightsync import Publisher
    from weightsync.store import SyncStore

    weights = [tensors_of(Path(model)) for model in models]
    nbytes = sum(tensor.nbytes for tensor in weights[0].values())
    with engine.arena(engine.KEPT * nbytes) as directory:
        url = f"sqlite://{directory}/store.db"
        SyncStore(url).close()
        with Publisher(url, model=engine.MODEL) as publisher:

            def publish(index: int) -> Any:
                version = publisher.publish(weights[index].items(), activate=False)
                return next(record for record in publisher.versions() if record.version == version)

            yield publish


def main(asked: Path, answered: Path) -> None:
    import torch

    from loadtest.models.equality import flipping

    faulthandler.register(signal.SIGTERM, chain=True)  # at its limit: the log says where it was
    question = json.loads(asked.read_text())
    with flipping("pointed" if torch.cuda.is_available() else "copied"):
        if question["kind"] == "stock":
            from vllm.v1.engine.core import EngineCore

            llm = _engine(question["model"], question["options"])
            assert not hasattr(EngineCore, "hotswap_commit"), "this engine is not a stock one"
            found = {"answers": _answers(llm, question["prompts"])}
        else:
            found = _swap(question)
    answered.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
