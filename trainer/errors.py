"""The errors of the trainer.

TrainerError               base: message says what to do, `exit_code` is what the process ends with
├── ConfigError            a key of the configuration is unknown, missing or impossible
├── ModelError             the model directory, or a file of weights in it, cannot be trained, or not exactly
├── DataError              a record of the data set, or a file of metrics, cannot be used
├── RewardError            a reward gave no value (not a wrong answer: that is a score)
├── EnvironmentFailed      an episode could not be played: the environment raised, hung, died or answered nonsense
├── RolloutError           the gateway or the teacher refused a request, or did not answer within the retry budget
├── PublishError           a version could not be published or did not become active
├── CheckpointError        a checkpoint could not be written
│   └── ResumeError        a checkpoint is torn, or belongs to another run
├── MemoryPlanError        a phase, or every layout, needs more memory than there is, or a component cannot change
├── Diverged               the loss or the gradient is no longer a finite number
├── Preempted              SIGTERM came; what there is was saved
└── RankFailed             another rank failed; its own message was printed there
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the tree. `exit_code` 2 means the user can fix it before the run, 1 that it went wrong while running.
    `code` says what its class does not."""

    exit_code = 1

    def __init__(self, message: str = "", *, code: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.code, self.exit_code = code, exit_code or self.exit_code


class ConfigError(TrainerError, ValueError):
    """A configuration value cannot be used. `key` is its dotted path ('' for the file itself)."""

    exit_code = 2

    def __init__(self, key: str, problem: str, advice: str) -> None:
        self.key, self.problem, self.advice = key, problem, advice
        super().__init__(f"{key}: {problem}. {advice}" if key else f"{problem}. {advice}")


class ModelError(TrainerError):
    """The model directory cannot be trained, or its architecture or an option is not converted exactly; a weight file
    is missing, truncated or of another model; or the installed Megatron-Core is a release that is not supported."""

    exit_code = 2


class DataError(TrainerError):
    """A record of the data set cannot be used. Of a report: a metrics file is missing, empty or none, or the report
    cannot be written."""

    exit_code = 2


class RewardError(TrainerError):
    """A reward raised, returned something that is not a finite number, or its process ended. Counted; the step goes
    on. Code `timeout`: it took too long, and was killed or cancelled. With `exit_code` 2 this machine cannot isolate
    untrusted code: bubblewrap is missing, or the kernel refuses its namespaces."""


class EnvironmentFailed(TrainerError):
    """An episode could not be played. It is played again or left out; nothing is trained on it. Code `interrupted`: its
    process ended for the sake of another episode, and it is not to blame."""


class RolloutError(TrainerError):
    """The gateway, or the teacher of a distillation, refused a request, did not answer within the retry budget, or
    answered something else. `status` is the HTTP status (0: none)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class PublishError(TrainerError):
    """A version could not be published, or did not become active in time; the old one goes on serving. `final` when
    trying again cannot help."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        self.final = final
        super().__init__(message)


class CheckpointError(TrainerError):
    """A checkpoint could not be written, and the ones before it are whole; or a Hugging Face checkpoint could not."""


class ResumeError(CheckpointError):
    """A checkpoint is torn, or was written by a run that this configuration cannot continue."""

    exit_code = 2


class MemoryPlanError(TrainerError):
    """A component was asked for something that its state does not allow, or instances did not fall asleep, or wake, in
    time. With `exit_code` 2 a phase needs more bytes than the budget has, and nothing was moved; or no layout of the
    model fits on these GPUs. The message has the numbers."""


class Diverged(TrainerError):
    """The loss or the gradient norm is not finite. Nothing was published or saved after it."""


class Preempted(TrainerError):
    """The run was asked to end by SIGTERM, and has saved what there is. It is not done: the same command goes on."""

    exit_code = 143


class RankFailed(TrainerError):
    """Another rank failed. Its message was printed by that rank."""
