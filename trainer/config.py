"""The trainer's configuration: one frozen dataclass per component. Imports neither torch nor Megatron.

`load(path, overrides)` reads YAML strictly (trainer/strict.py) and checks what can be checked without the model.
Sizes are counts unless a name ends in `_s` (seconds).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from trainer import strict
from trainer.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]


def _positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(name, f"must be positive, got {value}", "Give a value above 0")


def _in_range(section: object, name: str, low: float, high: float) -> None:
    value = getattr(section, name)
    if not low <= value <= high:
        raise ConfigError(name, f"must be in [{low}, {high}], got {value}", "Give a value in that range")


@dataclass(frozen=True)
class ModelConfig:
    """A Hugging Face checkpoint directory (config.json, safetensors, tokenizer files) and the training precision.

    `bfloat16` keeps fp32 main weights in the optimizer and casts the model. `random_init` ignores the weight files
    and starts from Megatron's own initialisation (benchmarks).
    """

    path: str
    dtype: Dtype = "float32"
    random_init: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel dimensions; their product is the number of processes (ranks)."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        _positive(self, "tensor", "pipeline", "data")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, its states sharded over data-parallel ranks, and the learning-rate schedule."""

    lr: float = 1e-4
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "lr", "eps", "clip_grad")
        _in_range(self, "beta1", 0.0, 1.0)
        _in_range(self, "beta2", 0.0, 1.0)
        _in_range(self, "min_lr", 0.0, self.lr)
        _in_range(self, "weight_decay", 0.0, 10.0)
        _in_range(self, "warmup_steps", 0, 10**9)


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
        _positive(self, "minibatches")
        _in_range(self, "clip_low", 0.0, 1.0)
        _in_range(self, "clip_high", 0.0, 10.0)
        _in_range(self, "kl_coef", 0.0, 10.0)


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
        _in_range(self, "largest", 1, 9)
        _in_range(self, "noise", 0.0, 1.0)
        _in_range(self, "held_out", 0, (self.largest + 1) ** self.operands // 2)


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


@dataclass(frozen=True)
class GatewayConfig:
    """Where `/generate` answers. `api_key_env` names the environment variable that holds the inference key."""

    url: str
    api_key_env: str | None = None
    timeout_s: float = 120.0
    retry_s: float = 30.0
    concurrency: int = 64

    def __post_init__(self) -> None:
        _positive(self, "timeout_s", "retry_s", "concurrency")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError("url", f"{self.url!r} is not an HTTP address", "Write http://host:port")


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling. Temperature stays 1: the ratio needs log-probs of the distribution that was sampled from. `seeded`
    sends a seed with every request, so that a resumed run samples the same (engines sample a little slower then)."""

    max_tokens: int = 16
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seeded: bool = True

    def __post_init__(self) -> None:
        _positive(self, "max_tokens")
        if self.temperature != 1.0:
            raise ConfigError(
                "temperature",
                f"{self.temperature} would make the engine's log-probs those of another distribution",
                "Leave it at 1.0",
            )


@dataclass(frozen=True)
class PublishConfig:
    """Where versions go and how often. `store` defaults to the environment variable HOTSWAP_STORE.

    `dtype` is the published one: it must be what the serving engine was started with. `max_failures` is how many
    publishes in a row may fail (the old version goes on serving) before the run stops.
    """

    model: str
    store: str | None = None
    lineage: str = "trainer"
    every: int = 1
    dtype: Dtype = "bfloat16"
    timeout_s: float = 60.0
    max_failures: int = 0

    def __post_init__(self) -> None:
        _positive(self, "every", "timeout_s")
        _in_range(self, "max_failures", 0, 1000)

    @property
    def store_url(self) -> str:
        return self.store or os.environ.get("HOTSWAP_STORE", "")


@dataclass(frozen=True)
class CheckpointConfig:
    """`resume`: `auto` goes on from the newest whole checkpoint if there is one, `must` insists, `never` starts new."""

    path: str
    every: int = 100
    keep: int = 2
    resume: Literal["auto", "must", "never"] = "auto"

    def __post_init__(self) -> None:
        _positive(self, "every", "keep")


@dataclass(frozen=True)
class EvalConfig:
    """Greedy answers to held-out prompts through the gateway: at the start, every `every` steps and at the end."""

    every: int = 20
    prompts: int = 100

    def __post_init__(self) -> None:
        _positive(self, "every", "prompts")


@dataclass(frozen=True)
class TrainerConfig:
    """Everything one run needs. `batch` counts prompts (records) a step, `micro_batch` sequences a forward pass."""

    model: ModelConfig
    data: JsonlData | ArithmeticData
    algorithm: SftConfig | GrpoConfig
    steps: int
    batch: int = 16
    micro_batch: int = 128
    seed: int = 0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rewards: tuple[ExactMatchReward | RegexReward | CallableReward, ...] = (ExactMatchReward(),)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gateway: GatewayConfig | None = None
    publish: PublishConfig | None = None
    checkpoint: CheckpointConfig | None = None
    eval: EvalConfig | None = None
    metrics: str = "-"
    save_to: str | None = None

    def __post_init__(self) -> None:
        _positive(self, "steps", "batch", "micro_batch")
        needs = "grpo" if self.algorithm.name == "grpo" else "eval" if self.eval else ""
        if needs and self.gateway is None:
            raise ConfigError("gateway", f"missing, but {needs} samples through it", "Add gateway: {url: http://...}")
        if isinstance(self.algorithm, GrpoConfig) and not self.rewards:
            raise ConfigError("rewards", "empty, but grpo learns from rewards only", "Name at least one reward")
        if self.publish is not None and not self.publish.store_url:
            raise ConfigError("publish.store", "missing, and HOTSWAP_STORE is not set", "Set it to the store's URL")


def load(path: str | Path, overrides: list[str] | None = None) -> TrainerConfig:
    """Read a YAML file and apply `a.b=c` overrides. Raises ConfigError naming the key that does not fit."""
    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError("", f"cannot read {path}: {error.strerror}", "Name an existing YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("", f"{path} is not YAML: {error}", "Correct the file") from None
    data = {} if data is None else data
    strict.override(data, overrides or [])
    return strict.build(TrainerConfig, data)
