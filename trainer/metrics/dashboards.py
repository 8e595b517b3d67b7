"""Dashboards that draw a run's numbers: the gateway's console, TensorBoard, Weights & Biases.

Training goes on even if the gateway fails: a thread of its own posts to the admin port and leaves out events that it
cannot keep up with (the newest are kept); the first failure in a row is logged. TensorBoard and W&B share the names of
the numbers, grouped by what they are about. W&B is offline unless told otherwise: `wandb sync
DIR/wandb/offline-run-*` uploads it later.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from trainer.config import TelemetryConfig, WandbConfig
from trainer.connection import Bearer, verify
from trainer.errors import ConfigError
from trainer.metrics.writers import numbers

log = logging.getLogger(__name__)

ROUTE = "/admin/training/metrics"
EVENTS = frozenset({"step", "eval"})
MAX_FIELDS = 64  # that the route takes
WAITING = 64  # points kept while the gateway is slow
CLOSE_S = 3.0
_THROUGHPUT = frozenset({"tokens_per_s", "train_tokens_per_s", "train_tflops", "mfu"})
_ROLLOUT = frozenset(
    {"zero_std_groups", "truncated", "rollout_tokens", "versions_per_sample", "answer_tokens_mean", "answer_tokens_max"}
)
# W&B must neither ask for a key on the terminal nor keep a copy of what is printed there; its sampler of the machine's
# load is one more process, and outlives a killed run for seconds.
_SETTINGS = {"console": "off", "silent": True, "x_disable_stats": True, "disable_git": True, "disable_code": True}


class HttpMetrics:
    """A MetricsWriter. `reward` and `accuracy` are what the console draws, with `loss`, by `step`. The accuracy is that
    of the evaluation set that comes first; the others' numbers are posted with their set's name in front."""

    def __init__(self, config: TelemetryConfig) -> None:
        """Raises ConfigError when the admin key or the certificates cannot be read."""
        key, checks = Bearer(config.admin_key), verify(config)
        self._client = httpx.Client(base_url=config.admin_url, auth=key, verify=checks, timeout=config.timeout_s)
        self._waiting: queue.Queue[dict[str, float] | None] = queue.Queue(maxsize=WAITING)
        self._failing = False
        self._drawn: str | None = None
        self._thread = threading.Thread(target=self._run, name="training metrics", daemon=True)
        self._thread.start()

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Returns at once; an event that is no step's and no evaluation's is not posted."""
        if event == "eval":
            self._drawn = self._drawn or values["set"]
        if event in EVENTS:
            self._put(point(event, values, values["set"] if event == "eval" and values["set"] != self._drawn else ""))

    def close(self) -> None:
        """Posts what still waits, within a few seconds."""
        self._put(None)
        self._thread.join(CLOSE_S)
        self._client.close()

    def _put(self, item: dict[str, float] | None) -> None:
        while True:
            try:
                self._waiting.put_nowait(item)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._waiting.get_nowait()  # the oldest makes way

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._client.post(ROUTE, json=item).raise_for_status()
                self._failing = False
            except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed under way
                if not self._failing:
                    log.warning("the gateway does not take training metrics: %s", error)
                self._failing = True


def point(event: str, values: Mapping[str, Any], of: str = "") -> dict[str, float]:
    """An event's finite numbers, under the names the console knows. An evaluation's reward is not the training's, and
    the numbers of a set that is not drawn are `of` it."""
    if of:
        named = {f"{of}/{name}": value for name, value in numbers(values).items() if name not in ("step", "version")}
        return {"step": values["step"], **dict(list(named.items())[: MAX_FIELDS - 1])}
    renamed = {"reward_mean": "reward"} if event == "step" else {"reward_mean": "eval_reward"}
    found = {renamed.get(name, name): value for name, value in numbers(values).items()}
    first = {name: found.pop(name) for name in ("step", "version", "reward", "loss", "accuracy") if name in found}
    return first | dict(list(found.items())[: MAX_FIELDS - len(first)])


def tagged(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step or an evaluation by tag: `eval/held_out/accuracy`, `time/rollout_ms`, `reward/mean`, ..."""
    event = f"eval/{values['set']}" if event == "eval" else event
    return {tag(event, name): value for name, value in numbers(values).items() if name != "step"}


def tag(event: str, name: str) -> str:
    """`eval/SET/...` for evaluations; a step's numbers by group, `train/...` where no other fits."""
    if event != "step":
        return f"{event}/{name}"
    if name.endswith("_ms"):
        return f"time/{name}"
    if name.startswith(("reward/", "reward_")):
        return "reward/" + name.removeprefix("reward/").removeprefix("reward_")
    if name in _THROUGHPUT:
        return f"throughput/{name}"
    if name in _ROLLOUT or name.startswith("version_lag"):
        return f"rollout/{name}"
    return f"train/{name}"


class TensorBoard:
    """Scalars of steps and evaluations by step. A resumed run hides what an earlier one wrote past its checkpoint."""

    def __init__(self, directory: str) -> None:
        """The directory is made; nothing is written before the run starts."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._writer: Any = None

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Queued; a thread of TensorBoard's writes it."""
        writer = self._opened(values.get("step", 0) if event == "start" else 0)
        if event == "start":
            writer.add_text("run", "\n\n".join(f"{name}: {value}" for name, value in values.items()))
        elif event in ("step", "eval"):
            for tag, value in tagged(event, values).items():
                writer.add_scalar(tag, value, values["step"])
        if event in ("eval", "done"):
            writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._directory, purge_step=step + 1 if step else None)
        return self._writer


class Wandb:
    """Numbers of steps and evaluations as one W&B run, with the run's configuration. `step` is an axis of its own:
    W&B refuses rows for a step it has passed, which a resumed run repeats."""

    def __init__(self, config: WandbConfig, run_config: Mapping[str, Any]) -> None:
        """Raises ConfigError when W&B does not start."""
        import wandb

        Path(config.dir).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name,
                group=config.group,
                id=config.id,
                resume="allow" if config.id and config.mode == "online" else None,
                tags=list(config.tags),
                dir=config.dir,
                mode=config.mode,
                config=dict(run_config),
                settings=wandb.Settings(**_SETTINGS),
            )
        except Exception as error:  # its own tree, and the network's
            advice = "Use mode offline, or leave watch.wandb out"
            raise ConfigError("watch.wandb", f"W&B does not start ({error})", advice) from error
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @property
    def directory(self) -> Path:
        """Where this run's files are."""
        return Path(self._run.dir).parent

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Handed to W&B's own process."""
        if event == "start":
            self._run.config.update({"run": values}, allow_val_change=True)
        elif event in ("step", "eval"):
            self._run.log(tagged(event, values) | {"step": values["step"]})
        elif event == "done":
            self._run.summary.update({"seconds": values.get("seconds")})

    def close(self) -> None:
        self._run.finish()
