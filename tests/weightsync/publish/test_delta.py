"""Deltas as files: what goes in comes out to the last bit, and nothing damaged or hostile does."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weightsync.codes import refused
from weightsync import Publisher, SlotReader
from weightsync.errors import PublishError
from weightsync.format import delta_codec
from weightsync.format.delta_codec import BLOCK, DENSE, FULL, HEAD, RAW, SAME, SPARSE
from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.manifest import Schema, TensorSpec, digest_of
from weightsync.publish.delta import Base, DeltaHeader, DeltaReader, DeltaWriter, apply_delta, end_of, is_worthwhile
from weightsync.publish.writer import copy_sums

Tensors = dict[str, tuple[TensorSpec, np.ndarray[Any, Any]]]
BASE = Base(7, "0123456789abcdef" * 2)


class Memory:
    """Stands for a draft and, with its bytes, for a slot: what `apply_delta` needs of either."""

    def __init__(self, tensors: Tensors, digest: str = BASE.manifest_digest) -> None:
        self.manifest_digest = digest
        self.data = {name: bytearray(data.tobytes()) for name, (_, data) in tensors.items()}
        self.manifest = SimpleNamespace(schema=Schema({name: spec for name, (spec, _) in tensors.items()}))

    def buffer(self, name: str) -> memoryview:
        return memoryview(self.data[name])

    def write(self, name: str, tensor: Any) -> str:
        self.data[name] = bytearray(tensor.spec.nbytes)
        return copy_sums(memoryview(self.data[name]), tensor, tensor.spec).digest


def tensors_of(**named: tuple[str, np.ndarray[Any, Any]]) -> Tensors:
    """name=(dtype, bytes or words); shapes are flat."""
    made = {}
    for name, (dtype, data) in named.items():
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        made[name] = (TensorSpec(dtype, (len(raw) // ITEMSIZE[dtype],)), raw)
    return made


def header_of(target: Tensors, base: Base | None = BASE) -> DeltaHeader:
    rows = {name: (spec, digest_of(memoryview(data))) for name, (spec, data) in target.items()}
    return DeltaHeader("demo", rows, base, step=3, metadata={"run": "a"}, source="a test")


def reading(tensors: Tensors) -> Callable[[str], Any]:
    return lambda name: tensors[name][1]


def writer(target: Tensors, base: Tensors | None, threads: int = 1) -> DeltaWriter:
    old = None if base is None else reading(base)
    return DeltaWriter(header_of(target, None if base is None else BASE), reading(target), old, threads=threads)


def encoded(target: Tensors, base: Tensors | None, threads: int = 1) -> bytes:
    return b"".join(writer(target, base, threads))


def applied(raw: bytes, base: Tensors | None, threads: int = 1) -> Memory:
    draft = Memory({})
    source: Any = None if base is None else Memory(base)
    apply_delta(DeltaReader(io.BytesIO(raw)), source, draft, threads=threads)
    return draft


def assert_same(draft: Memory, target: Tensors) -> None:
    assert draft.data == {name: data.tobytes() for name, (_, data) in target.items()}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """Two versions of a model: any dtype, any share of changed elements, all bit patterns, no and one element too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base: Tensors = {}
    target: Tensors = {}
    for number in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        shape = draw(st.sampled_from([(), (0,), (1,), (3, 5), (7, 1, 9), (257, 31), (BLOCK // 8 + 3,)]))
        spec = TensorSpec(dtype, shape)
        old = rng.integers(0, 256, spec.nbytes, np.uint8)
        words = old.view(delta_codec.WORD[ITEMSIZE[dtype]])
        new = words.copy()
        hit = rng.random(len(words)) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.3, 0.6, 1.0]))
        if draw(st.booleans()):
            new[hit] += rng.integers(0, 3, int(hit.sum())).astype(new.dtype)
        else:
            new[hit] = rng.integers(0, 256, int(hit.sum()) * new.itemsize, np.uint8).view(new.dtype)
        base[f"t{number}"], target[f"t{number}"] = (spec, old), (spec, new.view(np.uint8))
    return base, target


@given(pairs(), st.sampled_from([1, 3]))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_version_survives(pair: tuple[Tensors, Tensors], threads: int) -> None:
    base, target = pair
    assert_same(applied(encoded(target, base, threads), base, threads), target)
    assert_same(applied(encoded(target, None, threads), None, threads), target)


def change(share: float, elements: int = BLOCK, seed: int = 1) -> tuple[Tensors, Tensors]:
    """bf16 weights of which `share` move by one unit in the last place."""
    rng = np.random.default_rng(seed)
    old = ((rng.standard_normal(elements) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    hit = rng.random(elements) < share
    new[hit] += rng.choice(np.array([1, 0xFFFF], np.uint16), int(hit.sum()))
    return tensors_of(w=("bfloat16", old)), tensors_of(w=("bfloat16", new))


def test_each_block_takes_the_form_that_fits() -> None:
    for share, kind in ((0.0, SAME), (1e-4, SPARSE), (0.01, SPARSE), (0.5, DENSE)):
        base, target = change(share)
        made = writer(target, base)
        raw = b"".join(made)
        assert set(made.stats.kinds) == {kind}
        assert made.stats.nbytes == len(raw)
        assert_same(applied(raw, base), target)
    made = writer(target, None)
    assert len(b"".join(made)) < 0.8 * 2 * BLOCK  # exponents compress
    assert set(made.stats.kinds) == {FULL}
    plain = DeltaWriter(header_of(target, None), reading(target), compress=False)
    assert_same(applied(b"".join(plain), None), target)
    assert set(plain.stats.kinds) == {RAW}
    noise = tensors_of(w=("uint8", np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)))
    made = writer(noise, tensors_of(w=("uint8", np.zeros(BLOCK, np.uint8))))
    assert len(b"".join(made)) < BLOCK + 1024  # never more than the bytes themselves
    assert set(made.stats.kinds) == {RAW}


def test_a_hundredth_of_the_elements_takes_a_hundredth_of_the_bytes() -> None:
    base, target = change(0.01)
    made = writer(target, base)
    assert len(b"".join(made)) < 0.01 * 2 * BLOCK
    assert made.stats.changed == int((base["w"][1].view(np.uint16) != target["w"][1].view(np.uint16)).sum())


def test_a_base_that_does_not_help_is_left_out() -> None:
    base, target = change(0.01)
    assert is_worthwhile(header_of(target), reading(target), reading(base))
    noise = tensors_of(w=("bfloat16", np.random.default_rng(0).integers(0, 2**16, BLOCK, np.uint16)))
    assert not is_worthwhile(header_of(noise), reading(noise), reading(base))


def test_the_writer_can_be_read_again() -> None:
    base, target = change(0.05)
    made = writer(target, base, threads=2)
    assert b"".join(made) == b"".join(made)
    with pytest.raises(ValueError, match="go together"):
        DeltaWriter(header_of(target), reading(target))


def test_the_header_says_what_the_version_is() -> None:
    base, target = change(0.01)
    header = DeltaReader(io.BytesIO(encoded(target, base))).header
    assert header == header_of(target)
    assert header.target_digest == header_of(target, None).target_digest
    assert b'"config"' not in header.to_json(), "releases that know none read it"
    configured = replace(header, config='{"tie_word_embeddings": false}')
    assert DeltaHeader.from_json(configured.to_json()) == configured


SMALL_BASE, SMALL = change(0.05, elements=600)
SMALL_RAW = encoded(SMALL, SMALL_BASE)
UNSOUND = ("delta_error", "digest_mismatch")


@given(st.integers(0, 8 * len(SMALL_RAW) - 1))
@settings(max_examples=400, deadline=None)
def test_a_flipped_bit_anywhere_is_refused(bit: int) -> None:
    damaged = bytearray(SMALL_RAW)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PublishError) as caught:
        applied(bytes(damaged), SMALL_BASE)
    assert caught.value.code in UNSOUND


def test_a_delta_cut_off_anywhere_is_refused() -> None:
    for length in range(len(SMALL_RAW)):
        with refused("delta_error"):
            applied(SMALL_RAW[:length], SMALL_BASE)
    with refused("delta_error", "follow its end"):
        applied(SMALL_RAW + b"\0", SMALL_BASE)


@given(st.binary(max_size=200), st.integers(0, len(SMALL_RAW)), st.integers(0, 40))
@settings(max_examples=400, deadline=None)
def test_hostile_bytes_are_refused(junk: bytes, place: int, removed: int) -> None:
    hostile = SMALL_RAW[:place] + junk + SMALL_RAW[place + removed :]
    if hostile != SMALL_RAW:
        with pytest.raises(PublishError) as caught:
            applied(hostile, SMALL_BASE)
        assert caught.value.code in UNSOUND


def sealed(body: bytes, target: Tensors = SMALL, base: Base | None = BASE) -> bytes:
    """A delta whose digests are right, whatever its blocks say: what somebody with bad intentions sends."""
    raw = header_of(target, base).pack() + body
    return raw + end_of(digest_of(raw))


@given(
    st.sampled_from([SAME, SPARSE, DENSE, FULL, RAW, 5, 255]),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1) | st.integers(0, 700),
    st.integers(0, 2**32 - 1) | st.integers(0, 700),
    st.binary(max_size=300),
)
@settings(max_examples=600, deadline=None)
def test_blocks_made_up_with_right_digests_are_refused(
    kind: int, gap: int, changed: int, gaps: int, body: bytes
) -> None:
    with pytest.raises(PublishError) as caught:
        applied(sealed(HEAD.pack(kind, gap, 0, changed, gaps, len(body)) + body), SMALL_BASE)
    assert caught.value.code in UNSOUND


def test_a_small_file_cannot_ask_for_much_memory() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(16 << 20))
    streams = struct.pack("<II", 1 << 30 | len(bomb), 2 << 30) + bomb
    with refused("delta_error", "unpacks to 16,777,216"):
        applied(sealed(HEAD.pack(FULL, 0, 0, 0, 0, len(streams)) + streams, base=None), None)
    with refused("delta_error", "header claims"):
        DeltaReader(io.BytesIO(struct.pack("<8sII32s", b"HSDELTA\0", 1, 2**32 - 1, b"0" * 32)))
    with refused("delta_error", "claims"):
        applied(sealed(HEAD.pack(RAW, 0, 0, 0, 0, 2**32 - 1)), SMALL_BASE)


@pytest.mark.parametrize(
    "change_header",
    [
        lambda h: h | {"format": 2},
        lambda h: h | {"extra": 1},
        lambda h: {k: v for k, v in h.items() if k != "base"},
        lambda h: h | {"tensors": [["w", "complex64", [2], "0" * 32]]},
        lambda h: h | {"tensors": [["w", "uint8", [-1], "0" * 32]]},
        lambda h: h | {"tensors": [["w", "uint8", [2**62, 2**62], "0" * 32]]},
        lambda h: h | {"tensors": [["w", "uint8", [True], "0" * 32]]},
        lambda h: h | {"tensors": [["w", "uint8", [1], "x"]]},
        lambda h: h | {"tensors": [["w", "uint8", [1], "0" * 32]] * 2},
        lambda h: h | {"tensors": {"w": 1}},
        lambda h: h | {"base": [1]},
        lambda h: h | {"base": [1, "short"]},
        lambda h: h | {"metadata": {"a": 1}},
        lambda h: h | {"step": "3"},
        lambda h: h | {"config": {}},
        lambda h: h | {"config": ""},
        lambda h: [h],
    ],
)
def test_headers_of_another_shape_are_refused(change_header: Callable[[Any], Any]) -> None:
    raw = orjson.dumps(change_header(orjson.loads(header_of(SMALL).to_json())), option=orjson.OPT_SORT_KEYS)
    with refused("delta_error"):
        DeltaReader(io.BytesIO(struct.pack("<8sII32s", b"HSDELTA\0", 1, len(raw), digest_of(raw).encode()) + raw))


def test_another_base_is_refused() -> None:
    reader = DeltaReader(io.BytesIO(SMALL_RAW))
    other: Any = Memory(SMALL_BASE, digest="f" * 32)
    with refused("unknown_base", match="send the full version"):
        apply_delta(reader, other, Memory({}))
    with refused("unknown_base", match="not here"):
        apply_delta(DeltaReader(io.BytesIO(SMALL_RAW)), None, Memory({}))
    fewer: Any = Memory(change(0.0, elements=599)[0])
    with refused("delta_error", "not those of its base"):
        apply_delta(DeltaReader(io.BytesIO(SMALL_RAW)), fewer, Memory({}))


def test_a_damaged_base_names_the_tensor() -> None:
    damaged: Any = Memory(SMALL_BASE)
    damaged.data["w"][100] ^= 1
    with refused("digest_mismatch") as caught:
        apply_delta(DeltaReader(io.BytesIO(SMALL_RAW)), damaged, Memory({}))
    assert caught.value.tensor == "w"


def test_differences_without_a_base_are_refused() -> None:
    with refused("delta_error", "no base"):
        applied(sealed(HEAD.pack(SAME, 0, 0, 0, 0, 0), base=None), None)


def test_a_delta_becomes_a_version_in_a_slot_and_twice_the_same(publisher: Publisher) -> None:
    base, target = change(0.02, elements=3 * BLOCK + 17)
    publisher.publish({"w": base["w"][1].view(np.uint16)}, activate=False)
    (first,) = publisher.versions()
    words = tensors_of(w=("uint16", target["w"][1]))
    header = replace(header_of(words), base=Base(first.version, first.manifest_digest))
    with SlotReader.open(first.slot) as slot:
        raw = b"".join(DeltaWriter(header, reading(words), slot.buffer))
    for _ in range(2):
        with SlotReader.open(first.slot) as slot, publisher.begin(header.schema, base=first.version) as draft:
            apply_delta(DeltaReader(io.BytesIO(raw)), slot, draft)
            draft.commit()
    for record in publisher.versions()[1:]:
        with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as slot:
            slot.verify_all()
            assert bytes(slot.buffer("w")) == target["w"][1].tobytes()
            assert slot.entry("w").digest == header.tensors["w"][1]


# what no writer writes, one byte at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize(("numbers", "places"), [([3], [3]), ([0, 2], [0, 3]), ([4], None), ([0, 3], None)])
def test_a_change_is_within_its_block(numbers: list[int], places: list[int] | None) -> None:
    words = np.array(numbers, np.uint8)
    if places is not None:
        assert delta_codec._unpack_gaps(words, len(numbers), 4).tolist() == places
        return
    with refused("delta_error", "outside of itself"):
        delta_codec._unpack_gaps(words, len(numbers), 4)


@pytest.mark.parametrize("numbers", [[3, 255], [255], [3, 0]])
def test_a_block_lists_as_many_changes_as_it_claims_and_nothing_after(numbers: list[int]) -> None:
    with refused("delta_error", "another number of changes"):
        delta_codec._unpack_gaps(np.array(numbers, np.uint8), 1, 600)


@pytest.mark.parametrize("said", [6, 8])
def test_a_stream_says_the_size_it_has(said: int) -> None:
    packed = memoryview(zstandard.compress(b"1234567"))
    assert bytes(delta_codec._unpack(delta_codec.ZSTD, packed, 7)) == b"1234567"
    with refused("delta_error", f"unpacks to 7, not {said} bytes"):
        delta_codec._unpack(delta_codec.ZSTD, packed, said)


@pytest.mark.parametrize(
    ("table", "data", "complaint"),
    [
        ([2, 1], b"abc", None),
        ([2, 1], b"abcd", "belong to no stream"),
        ([2, 1], b"ab", "reaches beyond"),
        ([2, 2], b"abc", "reaches beyond"),
    ],
)
def test_streams_fill_their_block(table: list[int], data: bytes, complaint: str | None) -> None:
    body = b"".join(delta_codec._STREAM.pack(delta_codec.STORED << 30 | size) for size in table) + data
    if complaint is None:
        assert [bytes(plane) for plane in delta_codec._unpack_streams(memoryview(body), table)] == [b"ab", b"c"]
        return
    with refused("delta_error", complaint):
        delta_codec._unpack_streams(memoryview(body), table)
