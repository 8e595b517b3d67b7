"""What is learned and from what: algorithms, data sets, rewards. The first field of each section chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.checks import in_range, positive
from trainer.errors import ConfigError


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning: cross-entropy on the target tokens (`on_prompt` also on the prompt's)."""

    name: Literal["sft"] = "sft"
    on_prompt: bool = False


@dataclass(frozen=True)
class GrpoConfig:
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300) with DAPO's clip-higher (2503.14476).

    The behaviour policy is the engine's: its log-probs come with the rollouts. The ratio is clipped to
    [1 - clip_low, 1 + clip_high]. `kl_coef` above 0 adds the k3 estimate of KL to the initial weights, at the price
    of a second copy of the model. `scale_rewards: false` leaves the group's standard deviation out (Dr. GRPO).
    """

    name: Literal["grpo"] = "grpo"
    samples_per_prompt: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    scale_rewards: bool = True
    minibatches: int = 1

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 2:
            raise ConfigError("samples_per_prompt", f"{self.samples_per_prompt} is no group", "GRPO needs at least 2")
        positive(self, "minibatches")
        in_range(self, "clip_low", 0.0, 1.0)
        in_range(self, "clip_high", 0.0, 10.0)
        in_range(self, "kl_coef", 0.0, 10.0)


@dataclass(frozen=True)
class JsonlData:
    """Records, one JSON object a line. Held-out records are in their own file."""

    kind: Literal["jsonl"] = "jsonl"
    path: str = ""
    eval_path: str | None = None
    prompt_key: str = "prompt"
    target_key: str = "target"

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("path", "missing", "Name a JSONL file")


@dataclass(frozen=True)
class ArithmeticData:
    """Addition problems, generated. See trainer/data/arithmetic.py for what `mistake` and `noise` do to the targets."""

    kind: Literal["arithmetic"] = "arithmetic"
    operands: int = 2
    largest: int = 9
    noise: float = 0.0
    mistake: Literal["random", "off_by_one", "carry"] = "random"
    held_out: int = 0

    def __post_init__(self) -> None:
        if self.operands not in (2, 3):
            raise ConfigError("operands", f"{self.operands} is not supported", "Use 2 or 3 one-digit operands")
        in_range(self, "largest", 1, 9)
        in_range(self, "noise", 0.0, 1.0)
        in_range(self, "held_out", 0, (self.largest + 1) ** self.operands // 2)


@dataclass(frozen=True)
class ExactMatchReward:
    """1 when the answer's text equals the target, surrounding white space aside."""

    kind: Literal["exact_match"] = "exact_match"
    weight: float = 1.0


@dataclass(frozen=True)
class RegexReward:
    """1 when `pattern` is found; with a group named `answer`, 1 when that group equals the target."""

    kind: Literal["regex"] = "regex"
    pattern: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ConfigError("pattern", "missing", "Give a Python regular expression")


@dataclass(frozen=True)
class CallableReward:
    """`target` is `package.module:function`, called with (prompt, answer, target), all text; returns a number."""

    kind: Literal["callable"] = "callable"
    target: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.target.count(":") != 1:
            raise ConfigError("target", f"{self.target!r} names no function", "Write package.module:function")
