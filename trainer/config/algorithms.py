"""The configuration of algorithms: one struct each; its tag, `name`, chooses it. docs/trainer/algorithms.md has the
keys, trainer/algorithms the formulas.

Those that sample share `PolicyConfig`: the clipped policy gradient of trainer/algorithms/policy.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from trainer.config.sections import GatewayConfig
from trainer.config.strict import (
    Coefficient,
    Count,
    Fraction,
    FunctionName,
    Named,
    Natural,
    NonNegative,
    Positive,
    Section,
    Text,
)
from trainer.errors import ConfigError


class SftConfig(Named, frozen=True, tag="sft"):
    """Supervised fine-tuning: cross-entropy on the target tokens (`on_prompt` also on the prompt's)."""

    LR: ClassVar[float] = 2e-5  # TRL's

    on_prompt: bool = False


class DpoConfig(Named, frozen=True, tag="dpo"):
    """Direct preference optimisation (arXiv 2305.18290) against the initial weights. `label_smoothing` is the share of
    preferences that are wrong; `robust` (2403.00409) removes its bias, `ipo` (2310.12036) takes means over tokens."""

    LR: ClassVar[float] = 1e-6  # TRL's

    beta: Positive = 0.1
    loss: Literal["sigmoid", "robust", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Meta(ge=0.0, lt=0.5)] = 0.0
    minibatches: Count = 1

    def __post_init__(self) -> None:
        if self.loss == "ipo" and self.label_smoothing:
            raise ConfigError("label_smoothing", "is not defined for ipo", "Leave it at 0, or choose another loss")


class CorrectionConfig(Section, frozen=True):
    """The correction for tokens that other weights, or another engine's arithmetic, sampled
    (trainer/algorithms/correction.py). `max_lag` counts optimizer steps."""

    kind: Literal["none", "truncated", "masked"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: Fraction = 0.0
    high: Annotated[float, Meta(ge=1.0, le=1e6)] = 2.0
    max_lag: Natural | None = None
    lag_decay: Fraction = 1.0


ClipHigh = Annotated[float, Meta(ge=0.0, le=100.0)]
_CLIPPING = ("clip_low", "clip_high", "dual_clip", "ratio", "objective")


class PolicyConfig(Named, frozen=True):
    """The clipped policy gradient (trainer/algorithms/policy.py). The advantages are the algorithm's.

    `overlong_buffer` counts tokens before `rollout.max_tokens`, `length_after` optimizer steps. `length_weight` is the
    factor of Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3).
    """

    LR: ClassVar[float] = 1e-6  # TRL's and verl's

    samples_per_prompt: Count = 8
    clip_low: Fraction = 0.2
    clip_high: ClipHigh = 0.28
    dual_clip: float | None = None
    ratio: Literal["token", "sequence", "trajectory"] = "token"
    objective: Literal["clip", "cispo"] = "clip"
    normalize: Literal["token", "sequence", "length"] = "token"
    kl_coef: Coefficient = 0.0
    kl_unbiased: bool = False
    entropy_coef: Coefficient = 0.0
    minibatches: Count = 1
    epochs: Count = 1
    mask_truncated: bool = False
    overlong_buffer: Natural = 0
    overlong_penalty: Positive = 1.0
    length_weight: Coefficient = 0.0
    length_after: Natural = 0
    drop_zero_std: bool = False
    correction: CorrectionConfig = CorrectionConfig()

    def __post_init__(self) -> None:
        if self.kl_unbiased and not self.kl_coef:
            raise ConfigError("kl_unbiased", "set, but kl_coef is 0", "Raise kl_coef, or leave it out")
        if self.length_weight and self.samples_per_prompt < 2:
            raise ConfigError("length_weight", "compares the answers of a group", "Set samples_per_prompt to 2 or more")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError("dual_clip", f"{self.dual_clip} is within the clip range", "Set it above 1 + clip_high")
        if self.objective == "cispo" and self.dual_clip is not None:
            raise ConfigError("dual_clip", "has no meaning for cispo, which clips the weight", "Leave it out")
        if self.drop_zero_std and self.samples_per_prompt < 2:
            raise ConfigError("drop_zero_std", "a lone sample's rewards are always equal", "Leave it false")

    def _no_meaning(self, why: str, *keys: str) -> None:
        """Refuse options that this algorithm would not look at."""
        plain = {f.name: f.default for f in msgspec.structs.fields(PolicyConfig)}
        for key in keys:
            if getattr(self, key) != plain[key]:
                raise ConfigError(key, f"has no meaning for {self.name}, {why}", "Leave it out")

    @property
    def updates(self) -> int:
        """Optimizer updates a step."""
        return self.minibatches * self.epochs

    def _kl_in_reward(self) -> None:
        if self.kl_unbiased:
            problem = f"has no meaning for {self.name}, which has KL in the reward"
            raise ConfigError("kl_unbiased", problem, "Leave it out")

    def _needs_group(self) -> None:
        if self.samples_per_prompt < 2:
            advice = f"{self.name.upper()} needs at least 2"
            raise ConfigError("samples_per_prompt", f"{self.samples_per_prompt} is no group", advice)


class GrpoConfig(PolicyConfig, frozen=True, tag="grpo"):
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300): the reward among those of one prompt. Its
    descendants (Dr. GRPO, DAPO, GSPO, CISPO) are options."""

    scale_rewards: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._needs_group()


class RlooConfig(PolicyConfig, frozen=True, tag="rloo"):
    """REINFORCE leave-one-out (arXiv 2402.14740): the reward against the mean of the prompt's other samples. The whole
    answer is one action."""

    ratio: Literal["token", "sequence", "trajectory"] = "trajectory"
    normalize: Literal["token", "sequence", "length"] = "sequence"
    clip_high: ClipHigh = 0.2
    normalize_advantages: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kl_in_reward()
        self._needs_group()


class KimiConfig(PolicyConfig, frozen=True, tag="kimi"):
    """Kimi k1.5's policy optimisation (arXiv 2501.12599, section 2.3.2), a variant of online mirror descent. `tau` and
    `reset_optimizer` count from a step's second update on: a lone one knows no change, and Adam's first is the learning
    rate times the gradient's sign."""

    minibatches: Count = 4
    tau: NonNegative = 0.1
    reset_optimizer: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._needs_group()
        if self.reset_optimizer and self.updates == 1:
            problem = "set, but a step has one update, which is then the learning rate times the gradient's sign"
            raise ConfigError("reset_optimizer", problem, "Raise minibatches or epochs, or set it to false")
        self._no_meaning("which does not clip", *_CLIPPING, "normalize")


class ReinforceConfig(PolicyConfig, frozen=True, tag="reinforce++"):
    """REINFORCE++ (arXiv 2501.03262): KL by token in the reward, returns normalised over the whole batch."""

    samples_per_prompt: Count = 1
    clip_high: ClipHigh = 0.2
    baseline: bool = False
    gamma: Fraction = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kl_in_reward()
        if self.baseline and self.samples_per_prompt < 2:
            raise ConfigError("baseline", "is the mean of a group", "Set samples_per_prompt to at least 2")


class PpoConfig(PolicyConfig, frozen=True, tag="ppo"):
    """Proximal policy optimisation (arXiv 1707.06347) with a critic, a third or fourth copy of the model, and
    generalised advantage estimation (1506.02438). The critic starts from `critic_path` (default: the model) with a new
    head. `critic_lr` null: the optimizer's `lr`, or CRITIC_LR if that is not given either. `critic_warmup` counts
    steps."""

    CRITIC_LR: ClassVar[float] = 1e-5  # verl's

    samples_per_prompt: Count = 1
    clip_high: ClipHigh = 0.2
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    normalize_advantages: bool = True
    value_clip: Positive | None = 0.2
    critic_lr: Positive | None = None
    critic_path: str | None = None
    critic_warmup: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kl_in_reward()


class CustomConfig(PolicyConfig, frozen=True, kw_only=True, tag="custom"):
    """A loss of one's own in place of the clipped one: `loss` is called with `PolicyTensors`
    (trainer/algorithms/custom.py)."""

    loss: FunctionName
    advantages: Literal["normalized", "centred", "leave_one_out", "reward"] = "normalized"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._no_meaning("whose loss is a function of yours: give it what it needs as options", *_CLIPPING)
        if self.advantages != "reward":
            self._needs_group()


class TeacherConfig(GatewayConfig, frozen=True, kw_only=True):
    """A server with OpenAI's completions, at `url` + /v1/completions, whose `model` is the teacher. `tokenizer` is a
    directory with the teacher's tokenizer.json, for servers that have no /tokenize to compare with."""

    SECTION = "algorithm.teacher"

    model: Text
    form: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    tokenizer: str | None = None
    min_logprob: Annotated[float, Meta(ge=-1e4, le=-1.0)] = -30.0


class DistillConfig(PolicyConfig, frozen=True, kw_only=True, tag="distill"):
    """On-policy distillation (GKD, arXiv 2306.13649): the loss is the reverse KL of policy and teacher by token."""

    LR: ClassVar[float] = 2e-5  # as fine-tuning's, which this is on the policy's own samples

    teacher: TeacherConfig
    samples_per_prompt: Count = 1
    reward_weight: Annotated[float, Meta(ge=0.0, le=1e3)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_weight:
            self._needs_group()
            return
        why = "which looks at no reward while reward_weight is 0"
        self._no_meaning(why, "drop_zero_std", "length_weight", "overlong_buffer")


AlgorithmConfig = (
    SftConfig
    | DpoConfig
    | GrpoConfig
    | RlooConfig
    | KimiConfig
    | ReinforceConfig
    | PpoConfig
    | CustomConfig
    | DistillConfig
)
