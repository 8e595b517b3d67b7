"""The configuration of a step: model, layout, packing, optimizer, gateway, rollouts, schedule and publishing."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Meta, field
from msgspec.structs import force_setattr

from trainer.config.strict import (
    Coefficient,
    Count,
    Finite,
    Fraction,
    Named,
    Natural,
    NonNegative,
    Positive,
    Section,
    found_store,
    key_in,
    server,
)
from trainer.errors import ConfigError
from weightsync.control.parts import LORA, NAME_RULE, check_name
from weightsync.errors import PublishError

LinearLayer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR_LAYERS: tuple[LinearLayer, ...] = get_args(LinearLayer)
LORA_LR = 10.0
GIVEN = {"messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
Dtype = Literal["float32", "bfloat16"]
TrainDtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Section, frozen=True):
    """A Hugging Face checkpoint directory (config.json, safetensors, tokenizer files), its precision and its memory.
    The router losses are those of Switch Transformer (arXiv 2101.03961) and ST-MoE (2202.08906). `chat_template` is a
    Jinja file."""

    path: str
    dtype: TrainDtype = "bfloat16"
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    recompute: Literal["none", "selective", "full"] = "none"
    fp32_head: bool = False
    router_balance_loss: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    router_z_loss: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if taken := sorted(self.chat_template_kwargs.keys() & GIVEN):
            raise ConfigError("chat_template_kwargs", f"has {taken[0]!r}, which a run gives itself", "Leave it out")
        if self.fp32_head and self.dtype == "float32":
            raise ConfigError("fp32_head", "set, but all of the model is in fp32", "Leave it out")
        if self.fp8 != "none" and self.dtype != "bfloat16":
            raise ConfigError("fp8", f"{self.fp8} works on top of bfloat16, not {self.dtype}", "Set dtype to bfloat16")


class LoraConfig(Section, frozen=True):
    """Low-rank adapters (arXiv 2106.09685), trained instead of the weights."""

    name: str = "adapter"
    rank: Count = 16
    alpha: Positive = 32.0
    dropout: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    target_modules: tuple[LinearLayer, ...] = LINEAR_LAYERS
    save: Literal["adapter", "merged"] = "adapter"

    def __post_init__(self) -> None:
        if not self.target_modules:
            raise ConfigError("target_modules", "empty, so nothing would be trained", "Name one, or leave it out")
        if len(set(self.target_modules)) < len(self.target_modules):
            raise ConfigError("target_modules", "names a layer twice", "Name each once")
        try:
            check_name(self.part)
        except PublishError:
            advice = f"Use {NAME_RULE}"
            raise ConfigError("name", f"{self.name!r} cannot be an adapter's", advice) from None

    @property
    def part(self) -> str:
        """The adapter's name in a version of the weights."""
        return LORA + self.name


class ParallelConfig(Section, frozen=True):
    """Sizes of the parallel dimensions; the product of the first four is the number of processes (ranks). `expert` and
    `expert_tensor` (default: `tensor`) divide `tensor` x `context` x `data`, the ranks that are already there."""

    tensor: Count = 1
    pipeline: Count = 1
    data: Count = 1
    context: Count = 1
    expert: Count = 1
    expert_tensor: Count | None = None
    virtual_pipeline: Count = 1
    sequence: bool = False
    shard: Literal["optimizer", "full"] = "optimizer"

    def __post_init__(self) -> None:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError("virtual_pipeline", "interleaves pipeline stages, but there is one", "Raise pipeline")
        if self.sequence and self.tensor == 1:
            raise ConfigError("sequence", "cuts between tensor-parallel ranks, but there is one", "Raise tensor")
        self._check_expert()
        self._check_shard()

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that cut each expert."""
        return self.expert_tensor or self.tensor

    def _check_expert(self) -> None:
        ranks, wanted = self.tensor * self.context * self.data, self.expert * self.expert_tensor_size
        if ranks % wanted:
            problem = f"{self.expert} x expert_tensor {self.expert_tensor_size} does not divide the {ranks} ranks"
            raise ConfigError("expert", f"{problem} of tensor x context x data", "Choose a divisor")

    def _check_shard(self) -> None:
        if self.shard != "full":
            return
        if self.data * self.context == 1:
            raise ConfigError("shard", "full shards over data-parallel ranks, but there is one", "Raise data")
        for other in ("pipeline", "tensor", "expert"):
            if getattr(self, other) > 1:
                problem = f"full with {other} {getattr(self, other)}: its shards are cut along data only"
                raise ConfigError("shard", problem, f"Set {other} to 1, or shard to optimizer")


class OptimizerConfig(Section, frozen=True):
    """AdamW or Muon (arXiv 2502.16982), and the learning-rate schedule.

    `lr` null: what TRL takes for the algorithm (`LR` in trainer/config/algorithms.py), and for adapters LORA_LR times
    as much ("LoRA Without Regret", Schulman et al. 2025). `beta2` and `clip_grad` are TRL's and verl's. `loss_scale`
    multiplies each token's loss, not their mean, so it starts lower than is usual.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive | None = None
    min_lr: NonNegative = 0.0
    warmup_steps: Natural = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: Coefficient = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    momentum: Fraction = 0.95
    ns_steps: Annotated[int, Meta(ge=1, le=100)] = 5
    clip_grad: Positive = 1.0
    offload: bool = False
    loss_scale: Positive = 2048.0
    loss_scale_window: Count = 1000

    def __post_init__(self) -> None:
        if self.name == "adamw" and (self.momentum, self.ns_steps) != (0.95, 5):
            raise ConfigError("momentum", "momentum and ns_steps are Muon's", "Set name to muon, or leave them out")
        if self.name == "muon" and self.offload:
            raise ConfigError("offload", "Muon's arithmetic is not done in host memory", "Set it to false")


class RolloutConfig(Section, frozen=True):
    """Sampling, at temperature 1: the ratio needs log-probs of the distribution that was sampled from.

    `max_tokens` is how much may follow a prompt: the answer, or all turns of an episode together, tools' answers too.
    `seeded` sends a seed with every request, so that a resumed run samples the same; engines sample a little slower
    then. `stop_repeats` and `token_budget` (partial rollouts) count tokens; both are Kimi k1.5's (arXiv 2501.12599).
    `routed_experts` is R3 (2510.11370). `attempts` is how often a trajectory is scored in all.
    """

    max_tokens: Count = 4096
    stop_token_ids: tuple[int, ...] = ()
    seeded: bool = True
    request: Literal["sample", "group"] = "sample"
    on_swap: Literal["keep", "recompute", "finish"] = "keep"
    attempts: Count = 2
    stop_repeats: Annotated[int, Meta(ge=16)] | None = None
    token_budget: Count | None = None
    routed_experts: bool = False
    fixed_sampler: bool = False

    @property
    def rounds(self) -> int:
        """Iterations that the longest trajectory takes."""
        return 1 if self.token_budget is None else -(-self.max_tokens // self.token_budget)

    def __post_init__(self) -> None:
        if self.token_budget is not None and self.token_budget >= self.max_tokens:
            problem = f"{self.token_budget} ends no trajectory before max_tokens ({self.max_tokens}) does"
            raise ConfigError("token_budget", problem, "Lower it, or leave it out")


class QuantizeConfig(Section, frozen=True):
    """How the published weights are quantised, from the bfloat16 export: `int8` per output channel, `fp8` in blocks of
    `block` x `block`, `w4a16` in groups of `group_size`, or as the `served` model is."""

    scheme: Literal["served", "int8", "fp8", "w4a16"]
    group_size: Count = 128
    block: Count = 128


class BucketConfig(Section, frozen=True):
    """A bucket that versions go to, any URL of fsspec's; its credentials come from the environment, as fsspec takes
    them. The newest `keep` versions stay there, and each `full_every`th is in full. `metrics` is the ADDRESS:PORT at
    which Prometheus finds what was carried there."""

    url: str
    keep: Count = 3
    full_every: Count = 10
    metrics: str | None = None

    def __post_init__(self) -> None:
        if "://" not in self.url:
            raise ConfigError("url", "is no URL", "Write one of fsspec's, such as s3://BUCKET/RUN")
        if re.search(r"://[^/]*@|\?", self.url):
            problem = "has credentials in it, which configurations are not to have"
            raise ConfigError("url", problem, "Put them into the environment, for S3 AWS_ACCESS_KEY_ID and the like")


class PublishConfig(Section, frozen=True):
    """Where versions go, and how often: to the store of a server (default: HOTSWAP_STORE, else that of the server on
    this host), a bucket, or both. `dtype` must be what the serving engine was started with. `max_failures` publishes in
    a row may fail (the old version goes on serving) before the run stops. `new_model`: the first version of `model` may
    come although the servers on the store serve other models alone."""

    model: str
    store: str | None = None
    new_model: bool = False
    lineage: str = "trainer"
    every: Count = 1
    dtype: Dtype = "bfloat16"
    quantize: QuantizeConfig | None = None
    timeout_s: Positive = 300.0
    max_failures: Natural = 0
    transport: Literal["auto", "tcp", "nixl"] = "auto"
    bucket: BucketConfig | None = None

    def __post_init__(self) -> None:
        if self.quantize is not None and self.dtype != "bfloat16":
            problem = f"{self.dtype}, but weights are quantised from the bfloat16 export"
            raise ConfigError("dtype", problem, "Set it to bfloat16, or leave quantize out")
        if not self.store_url and self.bucket is None:
            force_setattr(self, "store", found_store(self.model))  # looked for once: the server may end

    @property
    def store_url(self) -> str:
        return self.store or os.environ.get("HOTSWAP_STORE", "")


class PackingConfig(Section, frozen=True):
    """Sequences end to end in rows of at most `max_tokens` tokens, verl's budget of a GPU. A forward pass takes one
    row."""

    max_tokens: Count = 16384


class GatewayConfig(Section, frozen=True):
    """The gateway of `/generate`. `api_key_env` names the environment variable that holds the inference key, or
    `api_key_file` the file it is in, which is read again for every request. For https, `ca_file` is the authority that
    signed the gateway's certificate (default: those of the system), or `cluster_tls` a member's directory with tls.crt,
    tls.key and ca.crt. An answer may take `timeout_s`: one of thousands of tokens takes minutes. `concurrency` requests
    are under way at a time, all of a batch by default."""

    SECTION: ClassVar[str] = "gateway"

    url: str
    api_key_env: str | None = None
    api_key_file: str | None = None
    ca_file: str | None = None
    cluster_tls: str | None = None
    timeout_s: Positive = 1800.0
    retry_s: Positive = 30.0
    concurrency: Count = 512

    def __post_init__(self) -> None:
        server("url", self.url, self.ca_file, self.cluster_tls)

    def api_key(self) -> str | None:
        """Raises ConfigError when one is named that is not there."""
        if self.api_key_env is not None:
            if self.api_key_env not in os.environ:
                raise ConfigError(f"{self.SECTION}.api_key_env", f"{self.api_key_env} is not set", "Export it")
            return os.environ[self.api_key_env]
        return key_in(self.api_key_file, f"{self.SECTION}.api_key_file") if self.api_key_file is not None else None


class CurriculumConfig(Section, frozen=True):
    """From easy to hard, over the first `records` draws (trainer/rollouts/feed.py). `first` and `last` are
    difficulties, on the scale of the record's number `field`, or of 1 - success rate."""

    records: Count
    first: Finite
    last: Finite = 1.0
    field: str | None = None

    def __post_init__(self) -> None:
        if self.last <= self.first:
            problem = f"goes from a difficulty of {self.first} to one of {self.last}"
            raise ConfigError("last", problem, "Set last above first: a curriculum goes from easy to hard")
        if self.field is None and not 0.0 <= self.first < self.last <= 1.0:
            problem = f"{self.first} to {self.last}, but a measured difficulty is 1 - a success rate"
            raise ConfigError("first", problem, "Keep first and last within [0, 1], or name a field")


class OrderConfig(Section, frozen=True):
    """The choice and frequency of problems (trainer/rollouts/feed.py). Without it each comes once an epoch."""

    prioritize: bool = False
    curriculum: CurriculumConfig | None = None
    floor: Annotated[float, Meta(ge=0.001, le=1.0)] = 0.05
    rate: Annotated[float, Meta(ge=0.01, le=1.0)] = 0.5

    @property
    def thins(self) -> bool:
        """Whether there are problems whose turn may pass."""
        return self.prioritize or self.curriculum is not None

    @property
    def measures(self) -> bool:
        """Whether it goes by success."""
        return self.prioritize or (self.curriculum is not None and self.curriculum.field is None)


class ColocatedSchedule(Named, frozen=True, tag="colocated"):
    """A step's rollouts, then its training, by turns. `max_refills` and `oversample` are multiples of `batch`."""

    max_refills: Natural = 3
    oversample: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0


class OneStepOffSchedule(Named, frozen=True, tag="one-step-off"):
    """The next step's rollouts are under way while this one trains. The rest is as under `colocated`."""

    max_refills: Natural = 3
    oversample: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0


class AsyncSchedule(Named, frozen=True, tag="async"):
    """The server never stops: groups are taken as they finish. `max_lag` counts optimizer steps, `buffer` groups."""

    max_lag: Count = 2
    buffer: Count | None = None
    max_refills: Natural = 3


ScheduleConfig = ColocatedSchedule | OneStepOffSchedule | AsyncSchedule
