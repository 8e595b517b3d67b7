"""A bucket of versions: whole or not there, deltas with their bases, two publishers, kills, and what goes when.

A process of its own carries versions out of slots, whatever is killed; the newest goes first.
"""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from tests.waiting import wait_until
from tests.weightsync.codes import refused
from tests.weightsync.test_signing import pair
from weightsync import Adapter, BucketPublisher, Publisher, SlotReader
from weightsync.bucket import reader
from weightsync.bucket.__main__ import main
from weightsync.bucket.carrier import Carrier, Desk, Order
from weightsync.bucket.metrics import PublisherMetrics
from weightsync.bucket.objects import Bucket, StoredVersion, directory_of, redacted
from weightsync.errors import BucketDamaged, BucketError, VersionGone

Tensors = dict[str, np.ndarray[Any, Any]]


def weights(seed: int = 0, rows: int = 700) -> Tensors:
    rng = np.random.default_rng(seed)
    return {f"layers.{i}.weight": rng.standard_normal((rows, 256)).astype(np.float16) for i in range(3)}


def nudged(tensors: Tensors, seed: int = 1) -> Tensors:
    """The next step of a training run."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, tensor in tensors.items():
        words = tensor.copy().view(np.uint16)
        words[rng.random(words.shape) < 0.01] += 1
        made[name] = words.view(np.float16)
    return made


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run"


def publisher(url: str, **more: Any) -> BucketPublisher:
    return BucketPublisher(url, model="demo", **{"part_nbytes": 200_000, **more})


def newest(bucket: Bucket) -> StoredVersion:
    return bucket.read(bucket.numbers()[-1])


def files(url: str) -> list[str]:
    root = Path(url.removeprefix("file://"))
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_the_first_version_is_whole_and_the_next_are_differences(url: str) -> None:
    pub, tensors = publisher(url, keep=9, full_every=3), weights()
    for number in range(1, 6):
        assert pub.publish(tensors, step=10 * number, metadata={"a": "b"}) == number
        tensors = nudged(tensors, number)
    versions = [pub.bucket.read(number) for number in pub.bucket.numbers()]
    assert [version.base for version in versions] == [None, 1, 2, None, 4]
    assert versions[1].nbytes < versions[0].nbytes / 10
    assert len(versions[0].parts) > 3
    assert (versions[1].header.step, versions[1].header.metadata) == (20, {"a": "b"})
    assert [v.number for v in reader.chain(pub.bucket, versions[2], lambda _: False)] == [1, 2, 3]
    assert [v.number for v in reader.chain(pub.bucket, versions[2], lambda v: v.number == 2)] == [3]
    with refused("unsupported_dtype"):
        pub.publish({"x": np.zeros(2, "complex64")})
    assert pub.publish(weights(9), config={"model_type": "toy"}) == 6  # nothing alike: in full
    assert (newest(pub.bucket).base, newest(pub.bucket).header.config) == (None, '{"model_type": "toy"}')


def test_what_is_kept_can_be_read_and_nothing_else_is_there(url: str) -> None:
    pub, tensors = publisher(url, keep=2, full_every=4), weights()
    removed = []
    for number in range(1, 10):
        pub.publish(tensors)
        removed.append(pub.last["removed"])
        tensors = nudged(tensors, number)
    assert pub.bucket.numbers() == [5, 6, 7, 8, 9]  # 8 builds on 7, 6 and 5
    assert removed == [[], [], [], [], [], [1, 2, 3, 4], [], [], []]
    named = {part.path for number in pub.bucket.numbers() for part in pub.bucket.read(number).parts}
    assert set(files(url)) == named | {f"versions/{number:012}.json" for number in pub.bucket.numbers()}


def test_a_new_publisher_goes_on_in_full_and_the_one_before_learns_of_it(url: str) -> None:
    one = publisher(url)
    one.publish(weights())
    two = publisher(url)
    assert two.publish(nudged(weights())) == 2
    assert newest(two.bucket).base is None
    with refused("bucket_taken", match="has published version 2 in"):
        one.publish(nudged(weights(), 2))
    assert two.publish(nudged(nudged(weights()), 3)) == 3
    assert all(directory_of(two.bucket.read(int(name[5:17]))) in name for name in files(url) if name[:4] == "data")


def test_an_answer_that_was_lost_is_no_other_publisher(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pub = publisher(url)
    claim = pub.bucket.claim
    monkeypatch.setattr(pub.bucket, "claim", lambda version: claim(version) and claim(version))
    assert pub.publish(weights()) == 1


@pytest.mark.parametrize("same", [True, False])
def test_a_claim_whose_answer_was_lost_is_taken_up(url: str, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    pub, tensors = publisher(url), weights()
    pub.publish(tensors)
    put = pub.bucket._files.pipe_file

    def lost(path: str, value: bytes, mode: str = "overwrite") -> None:
        put(path, value, mode=mode)
        if mode == "create":
            raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(pub.bucket._files, "pipe_file", lost)
        with refused("bucket_unavailable"):
            pub.publish(nudged(tensors))
    assert pub.bucket.numbers() == [1, 2]
    again = nudged(tensors, 1 if same else 2)
    number = pub.publish(again)
    assert number == (2 if same else 3)
    assert pub.publish(nudged(again)) == number + 1
    assert pub.bucket.numbers() == list(range(1, number + 2))
    assert reader.verify(pub.bucket, newest(pub.bucket))


@pytest.mark.parametrize("reads", [1, 2])
def test_a_record_that_is_read_wrong_costs_no_version_its_data(
    url: str, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """One wrong read is the network's, and is repeated. A record that stays wrong may be a newer release's."""
    pub, tensors = publisher(url, keep=2), weights()
    for number in range(1, 5):
        pub.publish(tensors := nudged(tensors, number))
    read, wrong, before = pub.bucket._files.cat_file, [], files(url)

    def flipped(path: str) -> bytes:
        data: bytes = read(path)
        if path.endswith(f"versions/{3:012}.json") and len(wrong) < reads:
            wrong.append(path)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    monkeypatch.setattr(pub.bucket._files, "cat_file", flipped)
    assert pub.publish(nudged(tensors, 5)) == 5
    assert len(wrong) == reads
    assert set(before) < set(files(url))
    assert reader.verify(pub.bucket, newest(pub.bucket))
    assert pub.last["removed"] == []


def test_a_version_is_published_though_nothing_can_be_removed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pub, tensors = publisher(url, keep=1, full_every=1), weights()
    pub.publish(tensors)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not these credentials")

    with monkeypatch.context() as patch:
        patch.setattr(pub.bucket._files, "rm", refuse)
        assert pub.publish(tensors) == 2
    assert pub.bucket.numbers() == [1, 2]
    assert pub.publish(tensors) == 3
    assert pub.bucket.numbers() == [3]


def test_a_store_that_fails_half_way_is_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pub, tensors = publisher(url), weights()
    pub.publish(tensors)
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise OSError("http://user:secret@host/x?token=1 is away")

        patch.setattr(pub.bucket._files, "pipe_file", fail)
        with refused("bucket_unavailable", match="http://host/x is away") as told:
            pub.publish(nudged(tensors))
    assert "secret" not in str(told.value)
    assert pub.publish(nudged(tensors)) == 2
    assert newest(pub.bucket).base == 1


def fetched(bucket: Bucket, version: StoredVersion, directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in reader.fetch(bucket, version, directory)]


def test_only_parts_that_are_missing_or_damaged_are_fetched_again(url: str, tmp_path: Path) -> None:
    pub = publisher(url)
    pub.publish(weights())
    version = newest(pub.bucket)
    whole = fetched(pub.bucket, version, tmp_path / "good")
    part = Path(url.removeprefix("file://")) / version.parts[1].path
    part.write_bytes(bytes([part.read_bytes()[0] ^ 1]) + part.read_bytes()[1:])
    with pytest.raises(BucketDamaged, match="is damaged") as told:
        fetched(pub.bucket, version, tmp_path / "bad")
    assert version.parts[1].path in str(told.value)
    for file in (tmp_path / "good").iterdir():
        (tmp_path / "bad" / file.name).write_bytes(file.read_bytes())
    assert fetched(pub.bucket, version, tmp_path / "bad") == whole


def test_a_part_lies_among_the_parts_of_its_version(url: str) -> None:
    pub = publisher(url)
    pub.publish(weights())
    version = pub.bucket.read(1)
    outside = replace(version, parts=(replace(version.parts[0], path="data/../../etc/passwd"),))
    with pytest.raises(BucketDamaged, match="is no part of a version"):
        StoredVersion.from_bytes(outside.to_bytes(), "here")
    with pytest.raises(VersionGone):
        pub.bucket.read(3)


def test_a_version_builds_on_an_earlier_one(url: str) -> None:
    pub = publisher(url)
    for _ in range(2):
        pub.publish(weights())
    based = pub.bucket.read(2)
    assert based.base == 1
    with pytest.raises(BucketDamaged, match="version 1 cannot build on version 1"):
        StoredVersion.from_bytes(replace(based, number=1).to_bytes(), "here")


KILLED = """
import os, signal, sys
from weightsync.bucket.objects import Bucket
from tests.weightsync.bucket.test_bucket import publisher, weights
pub = publisher(sys.argv[1])
pub.publish(weights(5))
make, wrote = Bucket.write_part, []
def write_part(self, *what):
    part = make(self, *what)
    wrote.append(part)
    if len(wrote) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return part
Bucket.write_part = write_part
pub.publish(weights(6))
"""


def test_a_publisher_killed_half_way_leaves_no_version_and_nothing_for_long(url: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, url], check=False, timeout=240)
    assert done.returncode == -9
    bucket = Bucket(url)
    assert bucket.numbers() == [1]
    left = [name for name in files(url) if name.startswith(f"data/{2:012}")]
    assert len(left) >= 3
    pub = publisher(url)
    assert pub.publish(weights(7)) == 2
    assert not set(left) & set(files(url))
    assert reader.chain(bucket, newest(bucket), lambda _: False) == [newest(bucket)]


def test_a_version_is_signed_where_there_is_a_key(url: str, tmp_path: Path) -> None:
    private, _ = pair(tmp_path, "trainer")
    pub = publisher(url, sign=private)
    pub.publish(weights())
    assert "DSSE" not in newest(pub.bucket).header.signature
    assert "payloadType" in newest(pub.bucket).header.signature


def test_the_command_publishes_a_checkpoint_and_an_adapter(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.server.follow.checkpoints import write

    assert main([url, str(write(tmp_path / "checkpoint")), "--model", "demo", "--step", "7"]) == 0
    adapted = write(tmp_path / "adapter")
    (adapted / "config.json").rename(adapted / "adapter_config.json")
    assert main([url, str(adapted), "--model", "demo", "--part", "lora/x"]) == 0
    assert '"number":2' in capsys.readouterr().out
    one, two = (Bucket(url).read(number) for number in (1, 2))
    assert (one.part, one.header.step, one.header.config) == ("", 7, "{}")
    assert (two.part, two.others, two.header.metadata) == ("lora/x", {"": 1}, {"adapter_config": "{}"})
    assert main(["nothing://x", str(tmp_path / "checkpoint"), "--model", "demo"]) == 1
    assert "cannot be opened" in capsys.readouterr().err


def adapter(value: float) -> Adapter:
    return Adapter({"layers.0.lora_A.weight": np.full((8, 256), value, np.float16)}, {"r": 8})


def test_each_part_has_a_succession_of_its_own_and_records_say_where_the_others_are(url: str) -> None:
    pub, tensors = publisher(url, keep=9), weights()
    assert pub.publish(tensors) == 1
    assert pub.publish(adapter(1.0), part="lora/a") == 2
    assert pub.publish(nudged(tensors)) == 3
    changed = adapter(1.0)
    dict(changed.tensors)["layers.0.lora_A.weight"][0, 0] = 2.0
    assert pub.publish(changed, part="lora/a") == 4
    versions = [pub.bucket.read(number) for number in pub.bucket.numbers()]
    assert [(v.part, v.base) for v in versions] == [("", None), ("lora/a", None), ("", 1), ("lora/a", 2)]
    assert [version.others for version in versions] == [{}, {"": 1}, {"lora/a": 2}, {"": 3}]
    assert [v.number for v in reader.needed(pub.bucket, versions[3], lambda _: False)] == [1, 2, 3, 4]
    assert [v.number for v in reader.needed(pub.bucket, versions[3], lambda v: v.number in (2, 3))] == [4]
    assert reader.verify(pub.bucket, versions[3])[1] == sum(version.nbytes for version in versions)
    another = publisher(url, keep=1)
    assert another.publish(adapter(3.0), part="lora/b") == 5
    assert newest(another.bucket).others == {"": 3, "lora/a": 4}
    assert another.bucket.numbers() == [1, 2, 3, 4, 5]  # what the newest is made of
    for name, what in {"lora/a": {"x": np.zeros(2, np.float32)}, "lora/?": weights(), "other": weights()}.items():
        with refused("bad_part"):
            pub.publish(what, part=name)


def test_a_version_is_removed_unless_another_needs_it(url: str) -> None:
    pub, tensors = publisher(url, keep=9, full_every=2), weights()
    for number in range(1, 5):
        pub.publish(tensors)
        tensors = nudged(tensors, number)
    assert [pub.bucket.read(number).base for number in pub.bucket.numbers()] == [None, 1, None, 3]
    for number, problem in {1: r"versions 2 need it", 3: r"versions 4 need it", 4: "it is the newest"}.items():
        with refused("version_needed", match=problem):
            pub.bucket.remove(number)
    pub.bucket.remove(2)
    pub.bucket.remove(1)
    assert pub.bucket.numbers() == [3, 4]
    assert {name.split("/")[1][:12] for name in files(url) if name.startswith("data")} == {f"{3:012}", f"{4:012}"}
    with pytest.raises(VersionGone):
        pub.bucket.remove(1)


def test_a_trial_leaves_nothing_and_finds_what_keeps_no_two_publishers_apart(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(url)
    bucket.try_out()
    assert files(url) == []
    pipe = bucket._files.pipe_file
    monkeypatch.setattr(bucket._files, "pipe_file", lambda path, data, mode: pipe(path, data))
    with pytest.raises(BucketError, match="lets two publishers create one object"):
        bucket.try_out()
    assert files(url) == []


def test_metrics_count_versions_bytes_and_failures(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pub, tensors = publisher(url), weights()
    pub.publish(tensors)
    pub.publish(nudged(tensors))
    with monkeypatch.context() as patch:
        patch.setattr(pub.bucket, "claim", lambda _: "")
        with refused("bucket_taken"):
            pub.publish(tensors)
    page = pub.metrics.generate().decode()
    for kind, number in (("full", 1), ("delta", 2)):
        assert f'hotswap_bucket_versions_total{{kind="{kind}"}} 1.0' in page
        sent = next(
            line for line in page.splitlines() if line.startswith(f'hotswap_bucket_sent_bytes_total{{kind="{kind}"')
        )
        assert float(sent.split()[-1]) == pub.bucket.read(number).nbytes
        assert f'hotswap_bucket_publish_seconds_count{{kind="{kind}"}} 1.0' in page
    assert 'hotswap_bucket_publish_failures_total{code="bucket_taken"} 1.0' in page
    assert "hotswap_bucket_newest_version 2.0" in page
    assert "\nhotswap_bucket_lag_seconds 0.0\n" not in page  # one is ready and not there


def test_what_names_no_bucket_and_what_is_secret() -> None:
    with pytest.raises(BucketError, match="cannot be opened"):
        Bucket("nothing://x")
    with pytest.raises(ValueError, match="1 or more"):
        publisher("memory://x", keep=0)
    told = redacted("https://user:pass@host/path?sig=abc, no: 's3://key:secret@bucket/run?x=1'")
    assert told == "https://host/path, no: 's3://bucket/run'"


# carriers -------------------------------------------------------------------------------------------------------------


def ready(publisher: Publisher, tensors: Any, step: int) -> tuple[str, str]:
    """Slot and manifest digest of a version of these tensors."""
    version = publisher.publish(tensors, step=step, activate=False)
    record = next(v for v in publisher.versions() if v.version == version)
    return record.slot, record.manifest_digest


def test_slots_become_versions_and_differences(publisher: Publisher, url: str) -> None:
    first = weights()
    with closing(Carrier(url, model="demo")) as carrier:
        carrier.hand(*ready(publisher, first, 1), source="a test")
        (one,) = carrier.finish(120.0)
        carrier.hand(*ready(publisher, nudged(first), 2))
        (two,) = carrier.finish(120.0)
    versions = [Bucket(url).read(number) for number in (1, 2)]
    assert [(one.number, one.full, one.error), (two.number, two.full, two.error)] == [(1, True, ""), (2, False, "")]
    assert [version.base for version in versions] == [None, 1]
    assert [version.nbytes for version in versions] == [one.sent, two.sent]
    assert [(v.header.step, v.header.source) for v in versions] == [(1, "a test"), (2, "")]
    assert len(reader.verify(Bucket(url), versions[1])[0]) == 2


def test_a_slot_that_is_another_by_now_is_refused(publisher: Publisher, url: str) -> None:
    with closing(Carrier(url, model="demo")) as carrier:
        slot, _ = ready(publisher, weights(), 1)
        with pytest.raises(BucketError, match="slot"):
            carrier.hand(slot, "0" * 32)
        assert carrier.finish(0.0) == []


def test_an_answer_after_its_time_is_not_the_next_orders(
    publisher: Publisher, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, digest = ready(publisher, weights(), 1)
    with closing(Carrier(url, model="demo")) as carrier:
        carrier._process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("weightsync.bucket.carrier.TAKEN_S", 0.0)
            with refused("bucket_unavailable", match="did not answer"):
                carrier.hand(slot, digest)
        carrier._process.send_signal(signal.SIGCONT)
        with pytest.raises(BucketError, match="slot"):
            carrier.hand(slot, "0" * 32)
        assert [outcome.number for outcome in carrier.finish(120.0)] == [1]


def test_what_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with refused("bucket_unavailable", match="cannot be used"):
        Carrier(f"file://{tmp_path}/file/run", model="demo")
    with pytest.raises(BucketError, match="metrics cannot be served at nowhere"):
        Carrier(f"file://{tmp_path}/run", model="demo", metrics="nowhere:x")


def test_a_carrier_that_was_killed_is_told_and_started_anew(publisher: Publisher, url: str) -> None:
    first = weights()
    with closing(Carrier(url, model="demo")) as carrier:
        carrier.hand(*ready(publisher, first, 1))
        assert [outcome.error for outcome in carrier.finish(120.0)] == [""]
        carrier._process.kill()
        carrier._process.wait()
        carrier.hand(*ready(publisher, nudged(first), 2))
        (outcome,) = carrier.finish(120.0)
    assert (outcome.number, outcome.full, outcome.error) == (2, True, "")


LEFT_ALONE = """
import os, signal, sys
from weightsync.bucket.carrier import Carrier
print(Carrier(sys.argv[1], model="demo")._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_carrier_ends_with_whoever_started_it(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_ALONE, url], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{int(done.stdout)}/fd/0").exists(), 60.0)


class Held:
    """A BucketPublisher that puts nothing there before it may."""

    def __init__(self) -> None:
        self.metrics, self.last = PublisherMetrics(), dict[str, Any]()
        self.begun, self.may = threading.Event(), threading.Event()
        self.slots: list[SlotReader] = []

    def publish_slot(self, slot: SlotReader, *, part: str, source: str) -> int:
        self.begun.set()
        assert self.may.wait(60.0)
        self.slots.append(slot)
        self.last = {"number": len(self.slots), "sent": 1, "full": True, "seconds": 0.5}
        return len(self.slots)


def test_a_newer_version_takes_the_place_of_one_that_waits() -> None:
    publisher, answers, closed = Held(), io.BytesIO(), list[int]()
    desk = Desk(publisher, answers)  # type: ignore[arg-type]
    threading.Thread(target=desk.work, daemon=True).start()

    def order(number: int, part: str = "") -> Order:
        slot: Any = SimpleNamespace(number=number, close=lambda: closed.append(number))
        return Order(slot, part, "", 0.0)

    desk.take(order(1))
    assert publisher.begun.wait(60.0)
    for number, part in ((2, ""), (3, "lora/x"), (4, "")):
        desk.take(order(number, part))
    assert closed == [2]
    publisher.may.set()
    wait_until(lambda: len(publisher.slots) == 3 and answers.getvalue().count(b"\n") == 4, 60.0)
    assert [slot.number for slot in publisher.slots] == [1, 3, 4]  # type: ignore[attr-defined]
    outcomes = [orjson.loads(line)["outcome"] for line in answers.getvalue().splitlines()]
    assert [(o["number"], o["skipped"]) for o in outcomes] == [(0, True), (1, False), (2, False), (3, False)]
