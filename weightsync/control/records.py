"""The records in the store and the keys they live under. Small JSON objects; tensors never go there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import xxhash

from weightsync.control.strict_json import Record, shown
from weightsync.errors import WeightSyncError, record_refused

VersionState = Literal["publishing", "ready", "retired"]
SwapMode = Literal["together", "rolling"]
OnLost = Literal["abort", "continue"]
SwapPhase = Literal["prepare", "canary", "commit", "revert", "done", "aborted"]
CopyState = Literal["fetching", "ready", "failed"]
InstanceState = Literal["STOPPED", "STARTING", "SERVING", "STAGING", "STAGED", "COMMITTING", "TORN", "DRAINING"]

ARENA_KEY = "arena"
MODELS_PREFIX = "models/"
MOST_NAME = 512  # characters of a name in a key
MOST_TOLD = 4096  # characters of an error's message
# The folders of a model. A model `a/versions` would write among the versions of the model `a`.
TAKEN = frozenset(
    {"versions", "instances", "active", "target", "swap", "schema", "leader", "pauses", "counter", "schemas", "forms"}
    | {"starts", "publishers", "sleeps", "sleepers", "drains", "hosts", "disks", "takers", "parts"}
    | {"current", "policies", "evidence", "config", "editions"}
)


def check_leaf(what: str, name: str) -> str:
    """`name` itself, which is to be the last part of a key. Raises RecordError, which names `what` it is.

    A key that ends with "/" stands for all keys under it where revisions are compared (`Store.txn`)."""
    if not isinstance(name, str) or not name or "/" in name or not name.isprintable() or len(name) > MOST_NAME:
        problem = f"{shown(name)} cannot be the end of a key"
        raise record_refused(what, problem, f'Use 1 to {MOST_NAME} printable characters without "/"')
    return name


@dataclass(frozen=True)
class Keys:
    """The keys of one served model's records."""

    model: str

    def __post_init__(self) -> None:
        if not self.model or not self.model.isprintable() or len(self.model) > MOST_NAME:
            advice = f"Use 1 to {MOST_NAME} printable characters"
            raise record_refused("model name", f"{shown(self.model)} cannot be part of a key", advice)
        if taken := TAKEN.intersection(self.model.split("/")[1:]):
            problem = f"{self.model!r} would write among the records of another model"
            raise record_refused("model name", problem, f"Leave {min(taken)!r} out of it")

    @property
    def root(self) -> str:
        return f"{MODELS_PREFIX}{self.model}/"

    @property
    def versions(self) -> str:
        return f"{self.root}versions/"

    @property
    def instances(self) -> str:
        return f"{self.root}instances/"

    @property
    def active(self) -> str:
        return f"{self.root}active"

    @property
    def concerns(self) -> tuple[tuple[str, str], ...]:
        """The keys that each instance and each host follows, as prefixes and the first key of each: the commit; and
        `swap`, `target` and `versions/`, which are the last keys under the root. The instances' records are for those
        that coordinate and route."""
        return (self.active, ""), (self.root, self.swap)

    @property
    def target(self) -> str:
        return f"{self.root}target"

    @property
    def swap(self) -> str:
        return f"{self.root}swap"

    @property
    def schema(self) -> str:
        return f"{self.root}schema"

    @property
    def config(self) -> str:
        """The configuration in the model directory, as each instance tells it: versions without one have it."""
        return f"{self.root}config"

    @property
    def leader(self) -> str:
        """The coordinator that leads swaps now, under a lease."""
        return f"{self.root}leader"

    @property
    def pauses(self) -> str:
        return f"{self.root}pauses/"

    @property
    def history(self) -> str:
        """Outside `root`: who follows the model's records neither reads the past nor is woken by it."""
        return f"history/{self.model}/"

    @property
    def training(self) -> str:
        """The reports of a trainer on its steps; outside `root` for the same reason."""
        return f"training/{self.model}/"

    @property
    def copies(self) -> str:
        """The slots of each host; outside `root` so that a fetch wakes no follower of the model."""
        return f"copies/{self.model}/"

    @property
    def copy_hosts(self) -> str:
        """The hosts that fetch this model's slots; each record is under the lease of that host's peer."""
        return f"{self.copies}hosts/"

    @property
    def disks(self) -> str:
        """The versions that each host has on disk."""
        return f"{self.root}disks/"

    @property
    def counter(self) -> str:
        """The last version number given out; changes with every draft, so comparing it fences concurrent drafts."""
        return f"{self.root}counter"

    def part_schema(self, part: str) -> str:
        """The tensors every version of a part must have."""
        return f"{self.root}schemas/{part}" if part else self.schema

    @property
    def forms(self) -> str:
        """The forms of versions: their tensors and configurations."""
        return f"{self.root}forms/"

    def form(self, digest: str) -> str:
        return f"{self.forms}{digest}"

    @property
    def starts(self) -> str:
        """The outcomes of starts that a swap asked for, by instance."""
        return f"{self.root}starts/"

    def start(self, instance_id: str) -> str:
        return f"{self.starts}{check_leaf('instance id', instance_id)}"

    def version(self, version: int) -> str:
        return f"{self.versions}{version:08d}"

    def instance(self, instance_id: str) -> str:
        return f"{self.instances}{check_leaf('instance id', instance_id)}"

    def publisher(self, lineage: str) -> str:
        return f"{self.root}publishers/{check_leaf('lineage', lineage)}"

    def pause(self, pause_id: str) -> str:
        return f"{self.pauses}{check_leaf('pause id', pause_id)}"

    def copies_of(self, digest: str) -> str:
        """All hosts' copies of one slot."""
        return f"{self.copies}{digest}/"

    def copy(self, digest: str, host: str) -> str:
        """A host's copy of the slot whose manifest has `digest`; under the lease of that host's peer."""
        return f"{self.copies_of(digest)}{host}"

    def disk(self, host: str) -> str:
        """The copies that a host has on disk; "-" is the one host."""
        return f"{self.disks}{host or '-'}"

    def past_swap(self, number: int) -> str:
        return f"{self.history}{number:010d}"

    def training_point(self, slot: int) -> str:
        return f"{self.training}{slot:06d}"


@dataclass(frozen=True)
class ArenaRecord(Record):
    """The directory of a host's shared-memory slots."""

    directory: str


@dataclass(frozen=True)
class PartRecord(Record):
    """Weights beside the base model's: `name` is "draft" (the speculative model) or "lora/NAME".

    `version` is the one that published it: a version that changes only other parts carries it on."""

    name: str
    version: int
    slot: str
    manifest_digest: str
    nbytes: int
    fingerprint: str = ""
    signature: str = ""
    shares: tuple[str, ...] = ()


@dataclass(frozen=True)
class VersionRecord(Record):
    """One version. `nbytes` counts tensor bytes, `created_at` is unix seconds, `publisher` is the lineage.

    `fingerprint` is what every instance must arrive at when it has built the version ("": none was computed).
    `slot`, `manifest_digest` and `nbytes` are the base model's; `base_version` is the version that published them, if
    another, and `base_fingerprint` its own fingerprint where `fingerprint` is over base and parts. `form` names the
    FormRecord of its tensors; "": those of the key `schema`, with the configuration of the key `config`.
    `signature` is the base model's DSSE envelope (`signing.py`; "": not signed). `shares` are hosts that have
    chunks of the base model which its slot lacked when it was published. `refused`: an instance has refused to stage
    it for what it is, and no swap has committed it since."""

    version: int
    state: VersionState
    slot: str
    nbytes: int
    manifest_digest: str
    base: int | None
    step: int | None
    publisher: str
    token: int
    created_at: float
    source: str
    tensors: int
    fingerprint: str = ""
    parts: tuple[PartRecord, ...] = ()
    base_version: int | None = None
    base_fingerprint: str = ""
    form: str = ""
    signature: str = ""
    shares: tuple[str, ...] = ()
    refused: bool = False


@dataclass(frozen=True)
class FormRecord(Record):
    """The form that an engine must be started with to run a version. `tensors` is the JSON of its Schema, `config` the
    text of its config.json. Versions that differ in their values alone share one."""

    LONG_TEXTS = True
    tensors: str
    config: str

    @property
    def digest(self) -> str:
        digest: str = xxhash.xxh3_128_hexdigest(self.to_json())
        return digest


@dataclass(frozen=True)
class ShareRecord(Record):
    """A version's share of the requests, in percent, and the instances that run it for that; a wish names none.

    `shadow` is the percent of other versions' requests that are repeated on it. `fingerprint` is the version's, as in
    the VersionRecord.
    """

    version: int
    percent: float
    instances: tuple[str, ...] = ()
    fingerprint: str = ""
    shadow: float = 0.0


@dataclass(frozen=True)
class SplitRecord(Record):
    """How requests are divided between the active version, which has what the shares leave, and others.

    Each version is to have at least `minimum` instances. Requests that are equal in `sticky` go to one version: "key"
    (the API key), "session" (x-session-id) or "header:NAME"; "" has each request go where its turn is.
    """

    shares: tuple[ShareRecord, ...]
    sticky: str = ""
    minimum: int = 1

    def share_of(self, instance: str) -> ShareRecord | None:
        """The share that the instance is placed for; None: it runs the active version."""
        return next((share for share in self.shares if instance in share.instances), None)

    def percents(self, active: int) -> dict[int, float]:
        """By version, with the active one first; they make 100 together."""
        shares = {share.version: share.percent for share in self.shares}
        return {active: 100.0 - sum(shares.values())} | shares


def shared_versions(split: SplitRecord | None) -> list[int]:
    """The versions of its shares; none without a split."""
    return [share.version for share in split.shares] if split is not None else []


@dataclass(frozen=True)
class ActiveRecord(Record):
    """The one commit record. `epoch` grows by one with every commit, a rollback too. With a `split`, the instances of
    its shares run their versions, and all others `version`.

    `trial` is a share without requests: its instance, the canary of a swap, runs its version as if the next commit had
    come, and nobody but a probe asks it.
    """

    version: int
    epoch: int
    previous: int | None
    swap_id: str
    committed_at: float
    fingerprint: str = ""
    split: SplitRecord | None = None
    trial: ShareRecord | None = None

    def of(self, instance: str) -> ActiveRecord:
        """The commit as it concerns that instance; `trial` is None unless it is the canary."""
        if self.split is None and self.trial is None:
            return self
        trial = self.trial if self.trial is not None and instance in self.trial.instances else None
        share = trial or (self.split.share_of(instance) if self.split is not None else None)
        version, fingerprint = (share.version, share.fingerprint) if share else (self.version, self.fingerprint)
        epoch = self.epoch + 1 if trial else self.epoch
        return dataclasses.replace(self, version=version, epoch=epoch, fingerprint=fingerprint, split=None, trial=trial)


@dataclass(frozen=True)
class SwapRecord(Record):
    """The transaction in flight, or the last one. `id` is the id of the target record that asked for it.

    `deadline` and `opened_at` are unix seconds of the leader that opened it. Only the time between them counts: the
    phase prepare may last so long (`state.phase_s`). `canary` names the participant that tries the version before a
    rolling commit, `drain_s` how long each may wait for its streams to end before its flip, `on_lost` what becomes of
    the swap when a participant dies before the commit.

    `former` is the commit record before it, to which a failed commit returns. `changes` says what their forms differ
    in, if the engines must be started anew for it: then `turn` names the participant that may restart now.
    """

    id: str
    target: int
    phase: SwapPhase
    participants: tuple[str, ...]
    deadline: float
    opened_at: float
    reason: str | None = None
    tensor: str | None = None
    mode: SwapMode = "together"
    drain_s: float = 0.0
    canary: str | None = None
    on_lost: OnLost = "abort"
    changes: str = ""
    turn: str | None = None
    former: ActiveRecord | None = None
    split: SplitRecord | None = None

    def of(self, instance: str) -> SwapRecord:
        """The swap as it concerns that instance."""
        if self.split is None:
            return self
        share = self.split.share_of(instance)
        return dataclasses.replace(self, target=share.version if share else self.target, split=None)

    def answers(self, target: TargetRecord) -> bool:
        """Whether it came of that wish: as its swap, or as one that placed its versions anew (ID+NUMBER)."""
        return self.id.partition("+")[0] == target.id


@dataclass(frozen=True)
class TargetRecord(Record):
    """A wish: make `version` active, with a `split` or for all requests. The newest one counts."""

    version: int
    id: str
    requested_by: str
    deadline_s: float
    mode: SwapMode = "together"
    drain_s: float = 0.0
    on_lost: OnLost = "abort"
    split: SplitRecord | None = None


@dataclass(frozen=True)
class ErrorInfo(Record):
    """Why an instance could not do what it was asked."""

    code: str
    message: str
    tensor: str | None = None

    @classmethod
    def of(cls, error: Exception, otherwise: str = "internal_error") -> ErrorInfo:
        """An error as records name it. Its text may hold any path and have any length, and is cut so that it can be
        written: an instance without a readable error in its record does not answer."""
        code, tensor, text = otherwise, None, f"{type(error).__name__}: {error}"
        if isinstance(error, WeightSyncError):
            code, tensor, text = error.code, error.tensor, str(error)
        return cls(code, _plain(text), _plain(tensor) if tensor is not None else None)


def _plain(text: str) -> str:
    return text[:MOST_TOLD].encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class StartRecord(Record):
    """An instance was started for a swap so many times; `error`: why it does not start for it again."""

    swap_id: str
    attempts: int
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class CopyRecord(Record):
    """One host's copy of a slot, written by its peer, which others ask at `address` (HOST:PORT) for it.

    `slot` is its slot name, `digest` that of its manifest, `nbytes` the size of the whole slot, `since` unix seconds.
    A copy that is `fetching` serves the chunks it has; `error` says what holds it up. `delta_of`: the release before
    writes it where it has a difference to this slot. `rack`: where the host is, None if it was not told.
    """

    host: str
    slot: str
    digest: str
    nbytes: int
    state: CopyState
    address: str
    since: float
    error: ErrorInfo | None = None
    delta_of: str | None = None
    rack: str | None = None


@dataclass(frozen=True)
class CopyHostRecord(Record):
    """A host whose peer fetches slots; its `rack` ("": not told), and the digest of the `slices` it needs ("": all)."""

    host: str
    rack: str = ""
    slices: str = ""


@dataclass(frozen=True)
class DiskRecord(Record):
    """The copies that a host has on disk in `directory`: whole `versions`, which take `nbytes`. `since` is unix
    seconds.

    `wanted` is the version that was active when this was written; `error` says why it is not among them, if it failed.
    `failures` counts copies that could not be written since the process began.
    """

    host: str
    directory: str
    versions: tuple[int, ...]
    nbytes: int
    since: float
    wanted: int | None = None
    error: ErrorInfo | None = None
    failures: int = 0


@dataclass(frozen=True)
class DeviceRecord(Record):
    """A GPU, or with a `uuid` that begins with "MIG-" a part of one, that a rank computes on.

    `index` is that of the whole GPU on its host, as the driver counts (None: not known). `host` is "" where there is
    one.
    """

    uuid: str
    index: int | None = None
    host: str = ""


@dataclass(frozen=True)
class InstanceRecord(Record):
    """One serving instance, written by itself under its lease. `swap_id` is the last swap it answered for.

    `fingerprint` is that of the weights it runs, `staged_fingerprint` that of what it has staged. `built` is
    LAYOUT:DIGEST of what its engine made of the weights that it staged last, where that is not what was published;
    `expected_flip_ms` how long their commit stalls decoding (None: it changes references). `device_copies` is how many
    versions have room on each of its GPUs (None: it has none, or has staged nothing): others wait on the host.
    `step_loss` is by what part of their length steps were longer beside the last staging (None: there were none).
    `max_num_seqs` is how many requests its engine runs at one time (None: it does not say). `key` is what its port asks
    of a gateway: whoever reads the store is a member; nobody shows it. `form` is that of the versions its engine can
    run (None: whatever fits its directory, before the first version). `restarts`: it can start itself anew in another
    form. `leaves_at`: when it leaves, and others go on with its streams (unix seconds; None: it was not told to).
    `devices` are the GPUs of its ranks, in their order; there are none on a CPU.
    """

    id: str
    address: str
    state: InstanceState = "STARTING"
    active_version: int | None = None
    active_epoch: int = 0
    staged_version: int | None = None
    swap_id: str | None = None
    fingerprint: str | None = None
    staged_fingerprint: str | None = None
    error: ErrorInfo | None = None
    stage_ms: float | None = None
    staging_gbps: float | None = None
    step_loss: float | None = None
    commit_ms: float | None = None
    built: str = ""
    expected_flip_ms: float | None = None
    device_copies: int | None = None
    pid: int = 0
    model_dir: str = ""
    path: str = ""
    max_num_seqs: int | None = None
    form: str | None = None
    restarts: bool = True
    leaves_at: float | None = None
    devices: tuple[DeviceRecord, ...] = ()
    key: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class FlipRecord(Record):
    """An instance's part in a swap: what it runs afterwards, and what the swap cost it (ms, GB/s; None: nothing).

    `stall_ms` is how long its engine decoded nothing for the flip, `step_loss` by what part of their length steps were
    longer beside the staging.
    """

    instance: str
    version: int | None = None
    fingerprint: str | None = None
    stage_ms: float | None = None
    staging_gbps: float | None = None
    stall_ms: float | None = None
    step_loss: float | None = None


@dataclass(frozen=True)
class PastSwapRecord(Record):
    """A swap that has ended. Times are unix seconds; `previous` is the version that served before it.

    `verified`: whether what was built, or runs now, has the published fingerprint (None: it was not compared).
    `probe` is what the probe of the canary came to; None without a canary. `changes`, `split`: as in the SwapRecord.
    """

    id: str
    version: int
    outcome: Literal["done", "aborted"]
    mode: SwapMode
    opened_at: float
    ended_at: float
    committed_at: float | None = None
    epoch: int | None = None
    previous: int | None = None
    requested_by: str = ""
    reason: str | None = None
    tensor: str | None = None
    canary: str | None = None
    probe: Literal["passed", "failed"] | None = None
    fingerprint: str = ""
    verified: bool | None = None
    changes: str = ""
    flips: tuple[FlipRecord, ...] = ()
    split: SplitRecord | None = None


@dataclass(frozen=True)
class PublisherRecord(Record):
    """The publisher of a lineage: the holder of the highest token."""

    token: int
    pid: int
    host: str


@dataclass(frozen=True)
class LeaderRecord(Record):
    """The coordinator that takes the steps; `since` is unix seconds."""

    holder: str
    since: float


@dataclass(frozen=True)
class PauseRecord(Record):
    """Generation is paused while this record exists. It hangs on a lease of `ttl_s`: who paused it may die."""

    id: str
    requested_by: str
    ttl_s: float
    since: float


@dataclass(frozen=True)
class CounterRecord(Record):
    """The last version number given out."""

    version: int
