"""The store's records of releases. Every gateway reads them; a release goes on where a gateway that died has left it.

releases/{model}/current              ReleaseRecord, written by the leader of the coordinators, by compare-and-swap
releases/{model}/policies/{name}      text of a policy
releases/{model}/evidence/{id}/{step}/{gateway}   EvidenceRecord, written by that gateway alone
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from weightsync.control.strict_json import Record

State = Literal[
    "evaluating", "applying", "judging", "held", "finishing", "rolling_back", "done", "rolled_back", "cancelled"
]
ENDED: Final = ("done", "rolled_back", "cancelled")
Kind = Literal["live", "shadow"]


@dataclass(frozen=True)
class ReleaseKeys:
    """The keys of one model's releases. They are outside the model's own: who follows its swaps is not woken."""

    model: str

    @property
    def root(self) -> str:
        return f"releases/{self.model}/"

    @property
    def current(self) -> str:
        return f"{self.root}current"

    @property
    def policies(self) -> str:
        return f"{self.root}policies/"

    @property
    def evidence(self) -> str:
        return f"{self.root}evidence/"

    def policy(self, name: str) -> str:
        return f"{self.policies}{name}"

    def evidence_of(self, release: str, step: int = -1) -> str:
        """All of one step, or of the whole release."""
        return f"{self.evidence}{release}/" + (f"{step}/" if step >= 0 else "")


@dataclass(frozen=True)
class ReleaseRecord(Record):
    """The release under way, or the last one. Times are unix seconds; `since` is when its state began.

    `version` is the candidate and `stable` what it is to take over from. `policy` is the text as it was given: a
    change of a stored policy changes no release under way. `step` counts from 0. `reason` says why it is held, was
    rolled back or cancelled; `findings` what is known of each condition.
    """

    id: str
    version: int
    stable: int
    policy: str
    state: State
    step: int
    since: float
    started_at: float
    requested_by: str = ""
    reason: str = ""
    ended_at: float | None = None
    findings: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True)
class Counted(Record):
    """The observations of one metric of one version's answers: see statistics.Tally. `cluster`: of those that were
    drawn for the version together (splits.CLUSTERS); -1 for those that were drawn one by one."""

    metric: str
    kind: Kind
    version: int
    count: int
    total: float
    squares: float
    cluster: int = -1


@dataclass(frozen=True)
class LostMetric(Record):
    """Why a metric is not measured just now."""

    metric: str
    reason: str


@dataclass(frozen=True)
class EvidenceRecord(Record):
    """The counts of one gateway in one step of a release."""

    counted: tuple[Counted, ...] = ()
    lost: tuple[LostMetric, ...] = field(default=())
