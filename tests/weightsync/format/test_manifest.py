from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.weightsync.codes import refused
from weightsync.errors import ManifestError
from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.manifest import (
    ALIGNMENT,
    PAGE,
    Layout,
    Manifest,
    Schema,
    TensorEntry,
    TensorSpec,
    diff_schema,
    read_header,
    schema_of,
    write_header,
)

SCHEMA = schema_of(
    [("b", "bfloat16", (4, 8)), ("a", "float32", (3,)), ("scalar", "int64", ()), ("none", "int8", (0, 4))]
)

schemas = st.dictionaries(
    st.text(min_size=1, max_size=20),
    st.builds(TensorSpec, st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 50), max_size=3).map(tuple)),
    max_size=20,
).map(Schema)


def manifest_of(schema: Schema) -> Manifest:
    layout = Layout.of(schema)
    entries = {
        name: TensorEntry(s.dtype, s.shape, layout.offsets[name], s.nbytes, "0" * 32)
        for name, s in schema.tensors.items()
    }
    return Manifest(7, "demo", entries, base=6, step=100, metadata={"who": "me"})


def header_of(manifest: Manifest) -> memoryview:
    layout = Layout.of(manifest.schema)
    slot = memoryview(bytearray(layout.header_nbytes))
    write_header(slot, manifest, layout)
    return slot


@given(schemas)
def test_a_layout_is_aligned_and_without_overlap(schema: Schema) -> None:
    layout = Layout.of(schema)
    end = layout.header_nbytes
    assert end % PAGE == layout.total_nbytes % PAGE == 0
    for name, spec in schema.tensors.items():
        assert layout.offsets[name] % ALIGNMENT == 0
        assert layout.offsets[name] >= end
        end = layout.offsets[name] + spec.nbytes
    assert end <= layout.total_nbytes


@given(schemas)
def test_every_manifest_fits_into_its_header_and_survives_it(schema: Schema) -> None:
    manifest = manifest_of(schema)
    assert read_header(header_of(manifest), "slot") == (manifest, manifest.digest)


@given(schemas)
def test_a_schema_survives_json(schema: Schema) -> None:
    assert Schema.from_json(schema.to_json()) == schema
    assert diff_schema(schema, schema) == []


def test_layouts_do_not_depend_on_the_order_of_the_tensors() -> None:
    backwards = schema_of([(n, s.dtype, s.shape) for n, s in reversed(list(SCHEMA.tensors.items()))])
    assert Layout.of(backwards) == Layout.of(SCHEMA)
    assert backwards.digest == SCHEMA.digest


def test_every_difference_is_reported_with_what_was_expected() -> None:
    got = schema_of([("a", "float32", (4,)), ("b", "float16", (4, 8)), ("scalar", "int64", ()), ("new", "int8", (1,))])
    found = diff_schema(SCHEMA, got)
    kinds = ["missing_tensor", "unexpected_tensor", "shape_mismatch", "dtype_mismatch"]
    assert [(e.code, e.tensor) for e in found] == list(zip(kinds, ["none", "new", "a", "b"], strict=True))
    assert [(e.expected, e.got) for e in found[2:]] == [((3,), (4,)), ("bfloat16", "float16")]


def test_types_that_cannot_be_carried_are_refused() -> None:
    with refused("unsupported_dtype", match="'x' is complex64"):
        schema_of([("x", "complex64", (1,))])


def test_the_digest_covers_everything() -> None:
    manifest = manifest_of(SCHEMA)
    entry = replace(manifest.tensors["a"], digest="1" * 32)
    changes = [{"version": 8}, {"model": "x"}, {"base": None}, {"step": 1}, {"metadata": {}}]
    others = [replace(manifest, **c) for c in changes] + [replace(manifest, tensors={**manifest.tensors, "a": entry})]
    assert len({m.digest for m in [manifest, *others]}) == 7


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 64, 100])
def test_a_damaged_header_is_refused(offset: int) -> None:
    slot = header_of(manifest_of(SCHEMA))
    slot[offset] ^= 0x40
    with pytest.raises(ManifestError):
        read_header(slot, "slot")


@pytest.mark.parametrize("nbytes", [0, 10, 64, 70])
def test_a_header_that_is_cut_off_is_refused(nbytes: int) -> None:
    with pytest.raises(ManifestError):
        read_header(header_of(manifest_of(SCHEMA))[:nbytes], "slot")


def test_more_metadata_than_there_is_room_for() -> None:
    with pytest.raises(ManifestError, match="use less metadata"):
        header_of(replace(manifest_of(SCHEMA), metadata={"x": "y" * 100_000}))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"format":99}', b'{"format":1,"tensors":{"a":[1]}}'])
def test_what_is_not_a_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(raw)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b'[["a"]]', b'[["a","float32",3]]'])
def test_what_is_not_a_schema_is_refused(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        Schema.from_json(raw)
