"""The errors of the trainer.

TrainerError                 base: message says what to do, `exit_code` is what the process ends with
├── ConfigError              a key of the configuration is unknown, missing or impossible
├── ModelError               the model directory cannot be trained, or not exactly
│   └── WeightsError         a weight file is missing, truncated, or does not fit the model
├── UnsupportedMegatron      the installed Megatron-Core is a release whose private names may be others
├── DataError                a record of the data set cannot be used
├── RewardError              a reward gave no value (not a wrong answer: that is a score)
│   ├── RewardTimeout        it took too long and was killed
│   └── SandboxUnavailable   code cannot be run in isolation on this machine
├── EnvironmentFailed        an episode could not be played: the environment raised, hung, died or answered nonsense
├── RolloutError             the gateway refused a request, or did not answer within the retry budget
├── TeacherError             the teacher of a distillation refused, or answered something else than log-probs
│   └── TeacherUnreachable   it did not answer within the retry budget
├── PublishError             a version could not be published or did not become active
├── CheckpointError          a checkpoint could not be written
│   └── ResumeError          a checkpoint is torn, or belongs to another run
├── ReportError              a run cannot be reported on
├── NoLayout                 no parallel layout of a model fits on the GPUs there are
├── MemoryPlanError          a phase cannot be held in memory, or a component cannot change as asked
│   ├── OverBudget           what a phase needs is more than the budget; nothing was moved
│   └── SleepTimeout         instances did not fall asleep, or wake, in time
├── Diverged                 the loss or the gradient is no longer a finite number
├── Preempted                SIGTERM came; what there is was saved
├── RankLost                 another rank died, or the network between the ranks
└── RankFailed               another rank failed; its own message was printed there
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the tree. `exit_code` 2 means the user can fix it before the run, 1 that it went wrong while running."""

    exit_code = 1


class ConfigError(TrainerError, ValueError):
    """A configuration value cannot be used. `key` is its dotted path ('' for the file itself)."""

    exit_code = 2

    def __init__(self, key: str, problem: str, advice: str) -> None:
        self.key, self.problem, self.advice = key, problem, advice
        super().__init__(f"{key}: {problem}. {advice}" if key else f"{problem}. {advice}")


class ModelError(TrainerError):
    """The model directory cannot be trained, or its architecture or an option is not converted exactly."""

    exit_code = 2


class WeightsError(ModelError):
    """A weight file is missing, truncated, or does not fit the model. `file` and `tensor` say where, when known."""

    def __init__(self, message: str, *, file: str = "", tensor: str = "") -> None:
        self.file, self.tensor = file, tensor
        super().__init__(message)


class UnsupportedMegatron(TrainerError):
    """The installed Megatron-Core is a release whose private names may be others than those used here."""

    exit_code = 2

    def __init__(self, found: str | None, supported: tuple[str, ...]) -> None:
        self.found = found
        state = f"Megatron-Core {found} is installed" if found is not None else "Megatron-Core is not installed"
        super().__init__(
            f"{state}, and Hotswap works with {' or '.join(supported)}: install one of them (docs/install.md)"
        )


class DataError(TrainerError):
    """A record of the data set cannot be used."""

    exit_code = 2


class RewardError(TrainerError):
    """A reward raised, returned something that is not a finite number, or its process ended. Counted; the step goes
    on."""


class RewardTimeout(RewardError):
    """A reward took too long. Its process was killed and replaced."""


class SandboxUnavailable(RewardError):
    """This machine cannot isolate untrusted code: bubblewrap is missing, or the kernel refuses its namespaces."""

    exit_code = 2


class EnvironmentFailed(TrainerError):
    """An episode could not be played. It is played again or left out; nothing is trained on it."""


class EpisodeInterrupted(EnvironmentFailed):
    """The process of an episode ended for the sake of another one. It has to be played again, and is not to blame."""


class RolloutError(TrainerError):
    """The gateway refused a request, or did not answer within the retry budget. `status` is the HTTP status (0:
    none)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class TeacherError(TrainerError):
    """The teacher of a distillation refused, or answered something else than log-probs. `status` is the HTTP status
    (0: none)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class TeacherUnreachable(TeacherError):
    """The teacher did not answer within the retry budget."""


class PublishError(TrainerError):
    """A version could not be published, or did not become active in time; the old one goes on serving. `final` when
    trying again cannot help."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        self.final = final
        super().__init__(message)


class CheckpointError(TrainerError):
    """A checkpoint could not be written. The ones before it are whole."""


class ExportError(TrainerError):
    """A Hugging Face checkpoint could not be written. Training is unharmed."""


class ResumeError(CheckpointError):
    """A checkpoint is torn, or was written by a run that this configuration cannot continue."""

    exit_code = 2


class ReportError(TrainerError):
    """A metrics file is missing, empty or none, or the report cannot be written."""

    exit_code = 2


class NoLayout(TrainerError):
    """No layout of the model fits on these GPUs; the message has the nearest miss."""

    exit_code = 2


class MemoryPlanError(TrainerError):
    """A phase cannot be held in memory, or a component was asked for something that its state does not allow."""


class OverBudget(MemoryPlanError):
    """A phase needs more bytes than the budget has. Raised before anything is moved; the message has the numbers."""

    exit_code = 2

    def __init__(self, message: str, *, needed: int, budget: int) -> None:
        self.needed, self.budget = needed, budget
        super().__init__(message)


class SleepTimeout(MemoryPlanError):
    """Instances did not fall asleep, or did not wake, in time."""


class Diverged(TrainerError):
    """The loss or the gradient norm is not finite. Nothing was published or saved after it."""


class Preempted(TrainerError):
    """The run was asked to end by SIGTERM, and has saved what there is. It is not done: the same command goes on."""

    exit_code = 143


class RankLost(TrainerError):
    """Another rank died without a word, or the network between the ranks did."""


class RankFailed(TrainerError):
    """Another rank failed. Its message was printed by that rank."""
