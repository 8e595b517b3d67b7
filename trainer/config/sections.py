"""The configuration of a step: model, layout, packing, optimizer, gateway, rollouts, schedule and publishing."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Meta, field

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
    key_in,
    server,
)
from trainer.errors import ConfigError
from weightsync.errors import BadPart
from weightsync.memory.parts import LORA, NAME_RULE, check_name

LinearLayer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR_LAYERS: tuple[LinearLayer, ...] = get_args(LinearLayer)
LORA_LR = 10.0
GIVEN = {"messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
Dtype = Literal["float32", "bfloat16"]
TrainDtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Section, frozen=True):
    """A Hugging Face checkpoint directory (config.json, safetensors, tokenizer files), its precision and its memory.

    `bfloat16` and `float16` keep fp32 main weights in the optimizer and cast the model; `float16` scales the loss.
    `bfloat16` is TRL's and verl's default, and the precision in which models are served.
    `fp8` runs the linear layers in 8 bits on top of bfloat16 (a GPU that has it, with TransformerEngine).
    `recompute` computes activations a second time in the backward pass instead of keeping them: those of attention
    (`selective`) or of whole layers (`full`).
    `fp32_head` computes the logits of a half-precision model in fp32.
    `router_balance_loss` and `router_z_loss` are the coefficients of a mixture's auxiliary losses: for equal use of the
    experts (Switch Transformer, arXiv 2101.03961), and against large logits of the routers (ST-MoE, 2202.08906).
    `chat_template` is a Jinja file in place of the model's own template, `chat_template_kwargs` what a template is
    given besides the messages (`enable_thinking: false`). Servers are asked with token ids and keep their own.
    """

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
    """Low-rank adapters (arXiv 2106.09685) are trained instead of the weights, which stay as they are in `model.path`.

    A linear layer in `target_modules` (default: all; in a mixture those of every expert) adds `alpha` / `rank` x B A x,
    with `dropout` on x while it trains. The adapter is published, and asked for answers, as `name`. `save_to` gets the
    adapter in PEFT's format, or with `save: merged` the whole model with the adapter added to its weights.
    """

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
        except BadPart:
            advice = f"Use {NAME_RULE}"
            raise ConfigError("name", f"{self.name!r} cannot be an adapter's", advice) from None

    @property
    def part(self) -> str:
        """What the adapter is called in a version of the weights."""
        return LORA + self.name


class ParallelConfig(Section, frozen=True):
    """Sizes of the parallel dimensions; the product of the first four is the number of processes (ranks).

    `context` cuts sequences. `expert` spreads the experts of a mixture over ranks that are already there: those of
    `tensor` x `context` x `data`, in groups of `expert_tensor` that cut each expert (default: `tensor`).
    `virtual_pipeline` gives every pipeline stage that many chunks of layers (the interleaved schedule).
    `sequence` also cuts the activations between tensor-parallel regions along the sequence.
    `shard`: `optimizer` shards the optimizer's states over data-parallel ranks (ZeRO-1), `full` the weights and
    gradients too (ZeRO-3, torch's FSDP).
    """

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
    """AdamW or Muon, their states sharded over data-parallel ranks, and the learning-rate schedule.

    `lr` null: what TRL takes for the algorithm (`LR` in trainer/config/algorithms.py), and for adapters LORA_LR times
    as much ("LoRA Without Regret", Schulman et al. 2025). `beta2` and `clip_grad` are TRL's and verl's.
    `muon` (arXiv 2502.16982) makes the momentum of every matrix in a layer orthogonal, in `ns_steps` steps of Newton
    and Schulz; `momentum` is of those. Embedding, output layer, norms and biases stay AdamW's, with the same learning
    rate.
    `offload` keeps fp32 main weights and states in host memory and updates there (for GPUs: without one they are there
    anyway).
    `loss_scale` is where float16's dynamic scaling starts; it doubles after `loss_scale_window` good steps and halves
    when gradients overflow. It multiplies each token's loss, not their mean, so it starts lower than is usual.
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
    """Sampling, at temperature 1: the ratio needs log-probs of the distribution that was sampled from. `seeded`
    sends a seed with every request, so that a resumed run samples the same (engines sample a little slower then).

    `request: sample` asks for each sample by itself: its rewards start when it is complete, and a fleet shares a
    prompt's samples. `group` asks for a prompt's samples at once, which costs less where answers are a few tokens.
    `on_swap` is what new weights do to an answer that is being written: `keep` its keys and values, `recompute` them,
    or `finish` it on the version it began with; one that takes longer than the swap waits goes on with the new weights.
    `fixed_sampler` says that the server is meant to keep its weights: a run that samples and publishes nothing is
    refused without it.

    `max_tokens` is how much may follow a prompt: the answer, or all turns of an episode together, tools' answers too.
    The default has room for a chain of thought (TRL and verl: 512, their examples for reasoning 4096 to 8192).
    A trajectory without a reward (`rewards.on_failure`) is scored again up to `attempts` times in all.
    `stop_repeats` ends an answer whose last so many tokens are one passage eight times or more (Kimi k1.5's repeat
    detection): it counts as truncated, and its tokens up to there as its answer.
    `token_budget` is how many tokens a trajectory gets in an iteration; one that is longer goes on in the next, from
    the weights that are there then (partial rollouts, Kimi k1.5, arXiv 2501.12599, section 2.6.2).
    `routed_experts` asks for the experts that each token of a mixture went to, and training sends it there too (R3,
    2510.11370). The server has to record them.
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
    """How the published weights are quantised, from the bfloat16 export. `served`: as the served model is.

    `int8` per output channel, `fp8` in blocks of `block` x `block`, `w4a16` in groups of `group_size`.
    """

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
    """Where versions go, and how often. `store` is that of a server's versions, by default what the variable
    HOTSWAP_STORE of the environment names; `bucket` is for fleets that share no network with the trainer. One of both
    is needed.

    `dtype` is the published one: it must be what the serving engine was started with. `quantize` is for a server of
    quantised weights; one that quantises what it is given takes `dtype`. `max_failures` is how many publishes in a row
    may fail (the old version goes on serving) before the run stops. A publish may take `timeout_s`. `transport` brings
    shares of ranks on other hosts to rank 0's: `auto`, `tcp` or `nixl`.
    """

    model: str
    store: str | None = None
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

    @property
    def store_url(self) -> str:
        return self.store or os.environ.get("HOTSWAP_STORE", "")


class PackingConfig(Section, frozen=True):
    """Sequences end to end in rows of at most `max_tokens` tokens, each attending to itself only. A forward pass takes
    one row, so this bounds its activations; `micro_batch` is not used then. The default is verl's token budget of a
    GPU."""

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
    """From easy to hard, over the first `records` draws: problems of a difficulty of at most `first` at the beginning,
    of at most `last` at the end and from then on. The difficulty is the number `field` of a record's `extra` (`a.b`
    looks into an object), or without `field` what is measured, 1 - the problem's success rate."""

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
    """Which problems are drawn, and how often; left out, each once an epoch. The equations are in
    trainer/rollouts/feed.py.

    `prioritize` draws problem i in proportion to 1 - its success rate s_i, of which `rate` is the share that its newest
    group has. `curriculum` goes from easy to hard. `floor` is the least chance that a problem has when its turn comes.
    """

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
    """A step's rollouts, then its training, by turns: the two may share one device. Every token a step trains on was
    sampled from the weights that the step starts from, unless groups are oversampled or go on over several steps.

    `max_refills` bounds how many more prompts, as a multiple of `batch`, a step may draw for groups that the algorithm
    sends back (dynamic sampling). A step samples as many groups at once as the share that was of use lately asks for,
    up to `oversample` x `batch` more than it lacks; what is good and left over is used in the next steps.
    """

    max_refills: Natural = 3
    oversample: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0


class OneStepOffSchedule(Named, frozen=True, tag="one-step-off"):
    """The next step's rollouts are under way while this one trains: tokens are at most `publish.every` steps old,
    unless groups are oversampled or go on over several steps. `max_refills` and `oversample` as under `colocated`."""

    max_refills: Natural = 3
    oversample: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0


class AsyncSchedule(Named, frozen=True, tag="async"):
    """The server never stops: groups are taken as they finish, answers go on across swaps.

    No token is trained on that is more than `max_lag` optimizer steps old. `buffer` is how many groups may be sampled
    ahead, in flight and finished together; null is the most that the bound allows, (`max_lag` + 1) x `batch`. With
    `rollout.token_budget` a group may take longer; the tokens of it that are too old are read and not trained on.
    """

    max_lag: Count = 2
    buffer: Count | None = None
    max_refills: Natural = 3


ScheduleConfig = ColocatedSchedule | OneStepOffSchedule | AsyncSchedule
