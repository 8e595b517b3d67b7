"""Weights & Biases, offline unless told otherwise: `wandb sync DIR/wandb/offline-run-*` uploads it later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import WandbConfig
from trainer.errors import ConfigError
from trainer.metrics.tags import tagged

# W&B must neither ask for a key on the terminal nor keep a copy of what is printed there; its sampler of the machine's
# load is one more process, and outlives a killed run for seconds.
_SETTINGS = {"console": "off", "silent": True, "x_disable_stats": True, "disable_git": True, "disable_code": True}


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
