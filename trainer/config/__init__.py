"""The trainer's configuration: one frozen struct per component. Imports neither torch nor Megatron.

`load(path, overrides)` reads YAML strictly (trainer/config/strict.py) and checks what can be checked without the model.
docs/trainer.md and its pages say what each key does; docstrings here have sources, units and what one has to know to
read the code. Sizes are counts unless a name ends in `_s` (seconds).
"""

from __future__ import annotations

from pathlib import Path

from trainer.config import strict
from trainer.config.algorithms import (
    AlgorithmConfig,
    CorrectionConfig,
    CustomConfig,
    DistillConfig,
    DpoConfig,
    GrpoConfig,
    KimiConfig,
    PolicyConfig,
    PpoConfig,
    ReinforceConfig,
    RlooConfig,
    SftConfig,
    TeacherConfig,
)
from trainer.config.datasets import (
    AnswersData,
    ArithmeticData,
    ArrowData,
    CodeTasksData,
    CsvData,
    DataConfig,
    FileData,
    GymTask,
    HubData,
    JsonlData,
    ParquetData,
    ReasoningGymData,
    WebDatasetData,
)
from trainer.config.environments import (
    CallableEnvironment,
    EnvironmentConfig,
    FunctionTool,
    McpTools,
    PythonTool,
    SingleTurnEnvironment,
    ToolsEnvironment,
    VerifiersEnvironment,
)
from trainer.config.operation import (
    CheckpointConfig,
    EvalConfig,
    FaultsConfig,
    MemoryConfig,
    ServingMemory,
    TelemetryConfig,
    WandbConfig,
    WatchConfig,
)
from trainer.config.rewards import (
    CallableReward,
    ClassifierReward,
    CodeReward,
    ExactMatchReward,
    FormatReward,
    GroupReward,
    GymReward,
    JudgeReward,
    MathReward,
    RegexReward,
    RewardConfig,
)
from trainer.config.sections import (
    LINEAR_LAYERS,
    LORA_LR,
    AsyncSchedule,
    BucketConfig,
    ColocatedSchedule,
    CurriculumConfig,
    Dtype,
    GatewayConfig,
    LoraConfig,
    ModelConfig,
    OneStepOffSchedule,
    OptimizerConfig,
    OrderConfig,
    PackingConfig,
    ParallelConfig,
    PublishConfig,
    QuantizeConfig,
    RolloutConfig,
    ScheduleConfig,
)
from trainer.config.strict import Count, Natural, Positive, Section
from trainer.errors import ConfigError

__all__ = [
    "LINEAR_LAYERS",
    "AlgorithmConfig",
    "AnswersData",
    "ArithmeticData",
    "ArrowData",
    "AsyncSchedule",
    "BucketConfig",
    "CallableEnvironment",
    "CallableReward",
    "CheckpointConfig",
    "ClassifierReward",
    "CodeReward",
    "CodeTasksData",
    "ColocatedSchedule",
    "CorrectionConfig",
    "CsvData",
    "CurriculumConfig",
    "CustomConfig",
    "DataConfig",
    "DistillConfig",
    "DpoConfig",
    "Dtype",
    "EnvironmentConfig",
    "EvalConfig",
    "ExactMatchReward",
    "FaultsConfig",
    "FileData",
    "FormatReward",
    "FunctionTool",
    "GatewayConfig",
    "GroupReward",
    "GrpoConfig",
    "GymReward",
    "GymTask",
    "HubData",
    "JsonlData",
    "JudgeReward",
    "KimiConfig",
    "LoraConfig",
    "MathReward",
    "McpTools",
    "MemoryConfig",
    "ModelConfig",
    "OneStepOffSchedule",
    "OptimizerConfig",
    "OrderConfig",
    "PackingConfig",
    "ParallelConfig",
    "ParquetData",
    "PolicyConfig",
    "PpoConfig",
    "PublishConfig",
    "PythonTool",
    "QuantizeConfig",
    "ReasoningGymData",
    "RegexReward",
    "ReinforceConfig",
    "RewardConfig",
    "RlooConfig",
    "RolloutConfig",
    "ScheduleConfig",
    "ServingMemory",
    "SftConfig",
    "SingleTurnEnvironment",
    "TeacherConfig",
    "TelemetryConfig",
    "ToolsEnvironment",
    "TrainerConfig",
    "VerifiersEnvironment",
    "WandbConfig",
    "WatchConfig",
    "WebDatasetData",
    "load",
]


class TrainerConfig(Section, frozen=True):
    """Everything one run needs. `batch` counts prompts (records) a step, `micro_batch` sequences a forward pass where
    nothing is packed. Defaults are for models of a billion weights and more; `tiny_run` in trainer/tiny_model.py has
    those for tiny ones. Rows are packed, as prime-rl does, up to verl's token budget."""

    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig
    steps: int = 0
    epochs: Positive | None = None
    batch: Count = 64
    micro_batch: Count = 4
    packing: PackingConfig | None = PackingConfig()
    lora: LoraConfig | None = None
    seed: int = 0
    parallel: ParallelConfig = ParallelConfig()
    devices: int | str | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    rewards: tuple[RewardConfig, ...] = (ExactMatchReward(),)
    environment: EnvironmentConfig = SingleTurnEnvironment()
    order: OrderConfig = OrderConfig()
    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ColocatedSchedule()
    memory: MemoryConfig | None = None
    gateway: GatewayConfig | None = None
    telemetry: TelemetryConfig | None = None
    publish: PublishConfig | None = None
    checkpoint: CheckpointConfig | None = None
    faults: FaultsConfig = FaultsConfig()
    eval: tuple[EvalConfig, ...] = ()
    best: str | None = None
    metrics: str = "-"
    watch: WatchConfig = WatchConfig()
    save_to: str | None = None
    save_every: Natural = 0
    save_best: bool = False

    @property
    def served_name(self) -> str | None:
        """The model that the gateway is asked for; None: whichever it serves."""
        return self.lora.name if self.lora is not None and self.publish is not None else None

    @property
    def lr(self) -> float:
        """The learning rate, also where none is given."""
        return self._rate(self.optimizer.lr, self.algorithm.LR)

    @property
    def critic_lr(self) -> float:
        """A critic's."""
        given = getattr(self.algorithm, "critic_lr", None) or self.optimizer.lr
        return self._rate(given, PpoConfig.CRITIC_LR)

    def _rate(self, given: float | None, default: float) -> float:
        if given is not None:
            return given
        return default if self.lora is None else default * LORA_LR

    def __post_init__(self) -> None:
        self._check_length()
        if self.optimizer.min_lr > self.lr:
            problem = f"{self.optimizer.min_lr:g} is above the learning rate, {self.lr:g}"
            raise ConfigError("optimizer.min_lr", problem, "Lower it, or set optimizer.lr")
        samples = isinstance(self.algorithm, PolicyConfig)
        needs = self.algorithm.name if samples else "eval" if self.eval else ""
        self._check_evaluation()
        if needs and self.gateway is None:
            raise ConfigError("gateway", f"missing, but {needs} samples through it", "Add gateway: {url: http://...}")
        alone = isinstance(self.environment, SingleTurnEnvironment)
        rewarded = not isinstance(self.algorithm, DistillConfig) or self.algorithm.reward_weight > 0
        if samples and rewarded and not self.rewards and alone:
            raise ConfigError("rewards", f"empty, but {needs} learns from rewards only", "Name at least one reward")
        if not alone and self.rollout.request == "group":
            problem = f"group, but the episodes of {self.environment.kind} go on one by one"
            raise ConfigError("rollout.request", problem, "Set it to sample")
        if self.order.measures and not samples:
            problem = f"goes by measured success, but {self.algorithm.name} learns from its records and measures none"
            advice = "Leave prioritize out, and name a field of the curriculum"
            raise ConfigError("order", problem, advice)
        if samples:
            self._check_publishing()
        if samples and self.packing is not None and self.packing.max_tokens <= self.rollout.max_tokens:
            problem = f"a row of {self.packing.max_tokens} cannot take answers of {self.rollout.max_tokens}"
            raise ConfigError("packing.max_tokens", problem, "Set it to the longest prompt and answer together")
        if not samples and not isinstance(self.schedule, ColocatedSchedule):
            problem = f"{self.schedule.name} samples ahead, but {self.algorithm.name} learns from its records"
            raise ConfigError("schedule", problem, "Leave schedule out")
        if self.memory is not None and not isinstance(self.schedule, ColocatedSchedule):
            problem = f"phases share the device, but under {self.schedule.name} they overlap"
            raise ConfigError("memory", problem, "Set schedule.name to colocated, or leave memory out")
        if self.memory is not None and self.parallel.shard == "full":
            raise ConfigError("memory", "parallel.shard full owns its storages", "Set shard to optimizer")
        if self.optimizer.name == "muon" and self.parallel.shard == "full":
            problem = "muon makes whole matrices orthogonal, and parallel.shard full cuts all of them"
            raise ConfigError("optimizer.name", problem, "Set parallel.shard to optimizer, or name to adamw")
        if self.optimizer.name == "muon" and self.lora is not None:
            problem = "muon is for whole weights, and an adapter's matrices have a rank of their own"
            raise ConfigError("optimizer.name", problem, "Set it to adamw")
        if self.faults.on_diverged == "rollback" and self.checkpoint is None:
            raise ConfigError("faults.on_diverged", "rollback needs a checkpoint", "Add checkpoint: {path: ...}")
        if self.faults.max_restarts and self.checkpoint is not None and self.checkpoint.resume == "never":
            problem = "never, but faults.max_restarts would begin anew after each failure"
            raise ConfigError("checkpoint.resume", problem, "Set it to auto, with a checkpoint.path of its own")
        if self.save_to is not None and Path(self.save_to).resolve() == Path(self.model.path).resolve():
            raise ConfigError("save_to", "is model.path, which is read until the end", "Name another directory")
        if self.lora is not None and self.model.fp8 != "none":
            raise ConfigError("lora", "adapters are not trained on layers in 8 bits", "Set model.fp8 to none")
        if self.lora is not None and self.publish is not None and self.lora.name == self.publish.model:
            raise ConfigError("lora.name", f"{self.lora.name} is the base model's (publish.model)", "Choose another")
        if self.lora is not None and self.publish is not None and self.publish.quantize is not None:
            problem = "an adapter is published as it is, whatever the weights are that it is served over"
            raise ConfigError("publish.quantize", problem, "Leave it out")

    def _check_length(self) -> None:
        if self.epochs is None and self.steps <= 0:
            raise ConfigError("steps", f"must be positive, got {self.steps}", "Set it, or epochs of data in files")
        if self.epochs is not None and self.steps:
            raise ConfigError("epochs", f"given beside steps ({self.steps})", "Leave one out")
        if self.epochs is not None and not isinstance(self.data, FileData):
            raise ConfigError("epochs", f"given, but {self.data.kind} makes its records up", "Set steps instead")

    @property
    def best_by(self) -> tuple[str, str]:
        """The set and the metric that `best` names."""
        name, _, metric = (self.best or f"{self.eval[0].name}/accuracy").partition("/")
        return name, metric

    def _check_evaluation(self) -> None:
        sets = {entry.name: entry for entry in self.eval}
        if len(sets) < len(self.eval):
            raise ConfigError("eval", "two sets have the same name", "Give every set its own name")
        if self.save_to is None and (self.save_every or self.save_best):
            raise ConfigError("save_to", "missing, so there is nowhere to save to", "Name a directory")
        wanted = "save_best" if self.save_best else "checkpoint.keep_best"
        if not self.save_best and not (self.checkpoint is not None and self.checkpoint.keep_best):
            if self.best is not None:
                raise ConfigError("best", "names what nothing is kept by", "Set save_best or checkpoint.keep_best")
            return
        if not self.eval:
            raise ConfigError(wanted, "nothing is evaluated", "Add a set to eval")
        name, metric = self.best_by
        if name not in sets:
            raise ConfigError("best", f"eval has no set {name!r}", f"Write SET/METRIC; sets: {', '.join(sets)}")
        if metric not in sets[name].metrics and not metric.startswith("reward/"):
            choices = ", ".join(f"{name}/{each}" for each in (*sets[name].metrics, "reward/NAME"))
            raise ConfigError("best", f"set {name} has no number {metric!r}", f"Use one of {choices}")
        if self.publish is None or not self.publish.store_url:
            problem = "the answers would not be those of the weights that are trained"
            raise ConfigError(wanted, problem, "Add publish: {model: NAME, store: URL}")
        if sets[name].every % self.publish.every:
            problem = f"{sets[name].every} of {name} is no multiple of publish.every, so it would judge older weights"
            raise ConfigError("eval.every", problem, f"Set it to a multiple of {self.publish.every}")

    def _check_publishing(self) -> None:
        """Samples come from the weights that are trained, and the bound on their age leaves time to publish."""
        if self.publish is None and not self.rollout.fixed_sampler:
            problem = (
                f"missing, so {self.algorithm.name} would go on sampling from the weights that the server began with"
            )
            advice = "Add publish: {model: NAME}, or set rollout.fixed_sampler if the server is to keep its weights"
            raise ConfigError("publish", problem, advice)
        if self.publish is None:
            return
        if not self.publish.store_url:
            problem = f"missing, but {self.algorithm.name} samples from each version that it publishes"
            raise ConfigError(
                "publish.store", problem, "Set it to the store's URL; versions can go to publish.bucket too"
            )
        if self.rollout.fixed_sampler:
            raise ConfigError("rollout.fixed_sampler", "set, but publish changes the server's weights", "Leave one out")
        if isinstance(self.schedule, AsyncSchedule) and self.schedule.max_lag < self.publish.every:
            problem = (
                f"{self.schedule.max_lag}, but samples are {self.publish.every} steps old when the next version comes"
            )
            raise ConfigError("schedule.max_lag", problem, "Raise it to publish.every, or publish more often")


def load(path: str | Path, overrides: list[str] | None = None) -> TrainerConfig:
    """Read a YAML file and apply `a.b=c` overrides. Raises ConfigError naming the key that does not fit."""
    return strict.read(TrainerConfig, path, overrides)
