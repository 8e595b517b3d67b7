"""The configuration of algorithms: one struct each; its tag, `name`, chooses it.

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
    """Direct preference optimisation (arXiv 2305.18290) against the initial weights: a second copy of the model, or
    with `lora` the model without its adapters.

    `loss: sigmoid` is DPO's, with `label_smoothing` the conservative one (the share of preferences that are wrong);
    `robust` removes that share's bias (2403.00409); `ipo` regresses the per-token margin to 1 / (2 beta) (2310.12036).
    """

    LR: ClassVar[float] = 1e-6  # TRL's

    beta: Positive = 0.1
    loss: Literal["sigmoid", "robust", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Meta(ge=0.0, lt=0.5)] = 0.0
    minibatches: Count = 1

    def __post_init__(self) -> None:
        if self.loss == "ipo" and self.label_smoothing:
            raise ConfigError("label_smoothing", "is not defined for ipo", "Leave it at 0, or choose another loss")


class CorrectionConfig(Section, frozen=True):
    """The correction for tokens that other weights, or another engine's arithmetic, sampled.

    With w = trainer's probability at the start of the step / engine's, of a token, of the whole answer (`sequence`, a
    product) or its geometric mean (`geometric`): `truncated` weighs the loss by clamp(w, low, high) (TIS), `masked` by
    w where it is within [low, high] and leaves other tokens out of the loss and of its denominator (MIS, IcePop).
    `none` puts the engine's log-probs straight into the clipped ratio.

    Staleness, with or without that: tokens of weights more than `max_lag` optimizer steps old are left out likewise,
    the others weigh `lag_decay` to the power of their lag. At the levels of answers, the oldest token decides for all.
    """

    kind: Literal["none", "truncated", "masked"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: Fraction = 0.0
    high: Annotated[float, Meta(ge=1.0, le=1e6)] = 2.0
    max_lag: Natural | None = None
    lag_decay: Fraction = 1.0


ClipHigh = Annotated[float, Meta(ge=0.0, le=100.0)]
_CLIPPING = ("clip_low", "clip_high", "dual_clip", "ratio", "objective")


class PolicyConfig(Named, frozen=True):
    """The clipped policy gradient. `name` and the advantages are the algorithm's.

    The ratio of a token's probabilities, now and when it was sampled (see `correction`), is clipped to
    [1 - clip_low, 1 + clip_high] (0.28: DAPO's); `dual_clip` bounds it from above also where the advantage is negative.
    `ratio: sequence` takes the geometric mean over the answer instead (GSPO), `trajectory` the product.
    `objective: cispo` clips the ratio as a weight, without gradient, so that clipped tokens still learn.
    The loss is a mean over tokens, or over answers of their mean (`normalize: sequence`) or of their sum divided by
    `rollout.max_tokens` (`length`).
    `entropy_coef` above 0 rewards the policy's entropy, averaged as the loss is.
    `kl_coef` above 0 penalises KL to the initial weights, at the price of a second copy of the model. Where KL is in
    the loss, `kl_unbiased` weighs its estimate by the token's ratio to the policy that sampled it (DeepSeek-V3.2).
    `mask_truncated` leaves answers out that met `rollout.max_tokens`. Within the last `overlong_buffer` tokens before
    it the reward falls by up to `overlong_penalty`. `drop_zero_std` replaces groups with equal rewards by others.
    `length_weight` is the factor of Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), which prefers the
    shorter of a group's right answers; it counts from optimizer step `length_after` on.
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
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300): the reward among those of one prompt.

    `kl_coef` weighs the k3 estimate of KL in the loss. `scale_rewards: false` leaves the group's standard deviation
    out. Its descendants are options: docs/trainer/algorithms.md says which make Dr. GRPO, DAPO, GSPO and CISPO.
    """

    scale_rewards: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._needs_group()


class RlooConfig(PolicyConfig, frozen=True, tag="rloo"):
    """REINFORCE leave-one-out (arXiv 2402.14740): the reward against the mean of the prompt's other samples.

    The whole answer is one action: `ratio` is that of its probability, against the trainer's own at the start of the
    step, and the gradient of a step's only update is A times that of the sum of its tokens' log-probs.
    `kl_coef` weighs the answer's KL in the reward. `normalize_advantages` divides by the batch's standard deviation.
    """

    ratio: Literal["token", "sequence", "trajectory"] = "trajectory"
    normalize: Literal["token", "sequence", "length"] = "sequence"
    clip_high: ClipHigh = 0.2
    normalize_advantages: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kl_in_reward()
        self._needs_group()


class KimiConfig(PolicyConfig, frozen=True, tag="kimi"):
    """Kimi k1.5's policy optimisation (arXiv 2501.12599, section 2.3.2), a variant of online mirror descent.

    `tau` weighs the squared change of a trajectory's log-probability since the start of the step, which takes the place
    of clipping: the options that clip, and `ratio`, `objective` and `normalize`, have no meaning here.
    `reset_optimizer` has each step begin with an optimizer that has seen no gradient, since its problem is a new one.
    Both count from a step's second update on: a lone one knows no change, and Adam's first is the learning rate times
    the gradient's sign.
    """

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
    """REINFORCE++ (arXiv 2501.03262): KL by token in the reward, returns normalised over the whole batch.

    `baseline` subtracts the group's mean reward first (REINFORCE++-baseline). `gamma` discounts.
    """

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
    """Proximal policy optimisation (arXiv 1707.06347) with a critic, a third or fourth copy of the model.

    Generalised advantage estimation (1506.02438) with `gamma`, `lam`, normalised over the batch unless
    `normalize_advantages` is off. `kl_coef` weighs KL by token in the reward. Values move by at most `value_clip` from
    the old ones before their error stops counting (None: no clip). The critic starts from `critic_path` (default: the
    model) with a new head, learns with `critic_lr` (default: the optimizer's `lr`, or CRITIC_LR if that is not given
    either), and alone for `critic_warmup` steps.
    """

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
    """A loss of one's own over the tensors of the policy gradient, in place of the clipped one.

    `loss` is `package.module:function`, called with `PolicyTensors` (trainer/algorithms/custom.py), which hold
    `options` too. `advantages` says what a sample of a prompt is worth: its reward among the prompt's in units of their
    standard deviation (`normalized`), less their mean (`centred`), less the mean of the others (`leave_one_out`), or as
    it is (`reward`). The options that clip, and `ratio` and `objective`, have no meaning here.
    """

    loss: FunctionName
    advantages: Literal["normalized", "centred", "leave_one_out", "reward"] = "normalized"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._no_meaning("whose loss is a function of yours: give it what it needs as options", *_CLIPPING)
        if self.advantages != "reward":
            self._needs_group()


class TeacherConfig(GatewayConfig, frozen=True, kw_only=True):
    """A server with OpenAI's completions, at `url` + /v1/completions, whose `model` is the teacher. Keys, certificates
    and retries are as a gateway's.

    `form` is how it is asked for log-probs of a prompt: vLLM's `prompt_logprobs`, or the older `echo` with `logprobs`.
    `tokenizer` is a directory with the teacher's tokenizer.json, for servers that have no /tokenize to compare with.
    `min_logprob` is the least that a log-prob counts as: one token that the teacher rules out shall not outweigh all.
    """

    SECTION = "algorithm.teacher"

    model: Text
    form: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    tokenizer: str | None = None
    min_logprob: Annotated[float, Meta(ge=-1e4, le=-1.0)] = -30.0


class DistillConfig(PolicyConfig, frozen=True, kw_only=True, tag="distill"):
    """On-policy distillation (GKD, arXiv 2306.13649): a `teacher` says how probable it finds each token that the policy
    sampled, and the loss is the reverse KL of policy and teacher at each token.

    `reward_weight` above 0 adds so much of GRPO's advantage: reinforcement and distillation in one.
    """

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
