"""The report's plots: steps along, one panel a group of numbers; several runs on the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.report.events import RunEvents

FAINT, STRONG = 0.25, 1.0
SMOOTHED = 0.02  # an average over this share of the run is drawn over numbers that jump from step to step


@dataclass(frozen=True)
class Panel:
    """Numbers that share an axis. A key that ends with `*` stands for all that begin so."""

    name: str
    keys: tuple[str, ...]
    label: str
    log: bool = False
    share: bool = False  # between 0 and 1


PANELS = (
    Panel("accuracy", ("eval/*",), "of held-out prompts", share=True),
    Panel("reward", ("reward_mean", "full_reward", "reward/*"), "reward of training rollouts"),
    Panel("loss", ("loss", "critic_loss"), "loss"),
    Panel("gradient", ("grad_norm",), "gradient norm", log=True),
    Panel("groups", ("zero_std_groups", "truncated"), "share", share=True),
    Panel("length", ("answer_tokens_mean", "answer_tokens_max"), "tokens an answer"),
    Panel("policy", ("entropy", "kl", "clip_ratio", "clip_ratio_low", "clip_ratio_high"), "policy"),
    Panel("gap", ("logprob_gap_mean", "logprob_gap_max"), "|log-prob, engine - trainer|", log=True),
    Panel("lag", ("version_lag_mean", "version_lag_max"), "optimizer steps behind"),
    Panel("time", ("*_ms",), "milliseconds a step"),
    Panel("throughput", ("tokens_per_s", "train_tokens_per_s"), "tokens/s"),
    Panel("mfu", ("mfu",), "share of the peak", share=True),
)


def draw(runs: Sequence[RunEvents], directory: Path) -> list[str]:
    """Write one SVG a panel that has numbers; returns the file names. Equal runs give equal files."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "hotswap", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    return [f"{panel.name}.svg" for panel in PANELS if _draw(panel, runs, directory / f"{panel.name}.svg")]


def _draw(panel: Panel, runs: Sequence[RunEvents], target: Path) -> bool:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    drawn = [_line(axes, run, key, len(runs) > 1) for run in runs for key in _keys(panel, run)]
    if any(drawn):
        axes.set_xlabel("step")
        axes.set_ylabel(panel.label)
        axes.set_title(panel.name, fontsize=9)
        axes.legend(fontsize=7, frameon=False)
        if panel.log:
            axes.set_yscale("log", nonpositive="clip")
        if panel.share:
            axes.set_ylim(-0.02, 1.02 if panel.name != "mfu" else None)
        figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
    return any(drawn)


def _line(axes: Any, run: RunEvents, key: str, several: bool) -> bool:
    steps, values = run.series(key)
    if not steps:
        return False
    label = f"{run.name}: {key}" if several else key
    width = max(1, round(len(values) * SMOOTHED))
    if width < 2 or key.startswith("eval/"):
        axes.plot(steps, values, label=label, linewidth=1.2, marker="." if key.startswith("eval/") else None)
        return True
    (line,) = axes.plot(steps, smooth(values, width), label=label, linewidth=1.2, alpha=STRONG)
    axes.plot(steps, values, color=line.get_color(), linewidth=0.6, alpha=FAINT)
    return True


def smooth(values: Sequence[float], width: int) -> list[float]:
    """The mean over `width` values to either side, fewer at the ends."""
    windows = (values[max(0, i - width) : i + width + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _keys(panel: Panel, run: RunEvents) -> list[str]:
    keys: list[str] = []
    for key in panel.keys:
        if key == "eval/*":
            keys += [f"eval/{each}/{name}" for each, name in run.shares()]
        elif key.startswith("*"):
            keys += run.names(suffix=key[1:])
        elif key.endswith("*"):
            keys += run.names(prefix=key[:-1])
        else:
            keys.append(key)
    return list(dict.fromkeys(keys))
