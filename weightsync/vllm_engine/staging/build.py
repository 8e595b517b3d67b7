"""Builds a version in a layout slot from its published slot, and sums what it built.

The placement learnt from vLLM's loaders is replayed piece by piece: a piece of a published tensor is digested, copied
or packed to its place, and summed there, in the kernels' order, while it is in the cache. Where the kernels' bytes do
not determine the published ones, the published bytes are summed as they are read: for opaque parameters, and for casts
that lose bits (an fp32 checkpoint served in bf16). The bytes of oneDNN's kernels are private to C++: what is summed is
the matrix oneDNN is given.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash

from weightsync.errors import not_finite, unsupported_model
from weightsync.format.fingerprint import (
    MASK,
    Tile,
    TileSums,
    pack_rectangle,
    packed_rectangle,
)
from weightsync.format.manifest import Layout as SlotLayout
from weightsync.format.manifest import Schema
from weightsync.format.slices import Slices
from weightsync.memory.receiver import SlotReader
from weightsync.vllm_engine.device.generation import Pace, StagingDevice, running
from weightsync.vllm_engine.model.layout import Entry, Layout, View, place_views, plan_layout, words_of
from weightsync.vllm_engine.model.linear import LinearFn, pack_into, private_linear
from weightsync.vllm_engine.model.moves import Moved, random_words, recognise
from weightsync.vllm_engine.model.placement import (
    Pair,
    Placement,
    Rect,
    as_matrix,
    group_by_layer,
    layer_of,
    learn,
    load_group,
    matrix,
    pair_made,
)
from weightsync.vllm_engine.model.processing import Change, NotInPlace, Processing, in_place, same
from weightsync.vllm_engine.staging.published import Published, all_finite
from weightsync.vllm_engine.staging.sums import (
    LOSSLESS,
    Sum,
    compare,
    crop,
    in_blocks,
    packed_words,
    pieces,
    sum_as,
    sum_of,
    unpacked,
)


@dataclass
class Plan:
    """The result of processing a model, learnt by doing it once.

    `live` are the running tensors that get the contents of the slot's `views`, `scalars` where processing's numbers go,
    both by path. Modules in `private` are replaced as a whole in each instance, for the reason given.
    """

    views: dict[str, View] = field(default_factory=dict)
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Change] = field(default_factory=dict)
    private: dict[str, str] = field(default_factory=dict)
    moved: dict[str, Moved] = field(default_factory=dict)


@dataclass
class Built:
    """The parts of a version besides the bytes in the layout slot."""

    private: dict[str, LinearFn] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    parts: list[tuple[str, Tile, Sum]] = field(default_factory=list)

    def sums(self) -> TileSums:
        """For the worker's report: {name: [Tile.to_row(), ...]}; waits for the device."""
        sums: TileSums = {}
        for name, part, total in self.parts:
            sums.setdefault(name, []).append(replace(part, sum=int(total) & MASK).to_row())
        return sums


@dataclass(frozen=True)
class Reads:
    """The slices that a worker reads of each version, and the tensors that nothing in the worker is filled from."""

    slices: Slices
    unread: tuple[str, ...]


def blank_tensors(schema: Schema) -> dict[str, torch.Tensor]:
    """Tensors of this schema, as they would lie in a slot, in memory that takes no room; they cannot be written to."""
    layout = SlotLayout.of(schema)
    memory = mmap.mmap(-1, layout.total_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mapping is read-only
        for name, spec in schema.tensors.items():
            dtype, count = getattr(torch, spec.dtype), math.prod(spec.shape)
            found[name] = (
                torch.frombuffer(memory, dtype=dtype, count=count, offset=layout.offsets[name]).view(spec.shape)
                if count
                else torch.empty(spec.shape, dtype=dtype)
            )
    return found


class Builder:
    """Replays the placement of one model. The twin's own memory is touched for opaque and processed parameters only.

    `rank` and `world` are the worker's place among those that share the model, `share` among those on its host.
    """

    def __init__(
        self,
        twin: torch.nn.Module,
        pairs: list[Pair],
        place: StagingDevice,
        *,
        processing: Processing | None = None,
        rank: int = 0,
        world: int = 1,
        share: tuple[int, int] = (0, 1),
        allow_non_finite: bool = False,
    ) -> None:
        self._twin, self._pairs, self._place, self._processing = twin, pairs, place, processing
        self._rank, self._world, self._share = rank, world, share
        self._allow_non_finite = allow_non_finite
        self._threads = -(-place.digesting_threads // share[1])
        self._own = {s.name: s for s in pairs if s.name == s.source}
        self._processed = {name for name, pair in self._own.items() if pair.role == "processed"}
        self._processed_in: dict[str, list[str]] = {}
        for name in self._own:
            if name in self._processed:
                self._processed_in.setdefault(layer_of(name), []).append(name)
        self._shapes = {name: s.parameter.shape for name, s in self._own.items()}
        self._learnt: tuple[str, Placement] | None = None
        self.plan = Plan()
        self._scratch: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    @property
    def has_private(self) -> bool:
        """Whether a version has parts that each instance builds for itself."""
        return bool(self._private or self.plan.private)

    def prepare(self, reader: SlotReader, pace: Pace) -> Layout:
        """Learn where the tensors of this published slot go, unless the last one had the same names, shapes, dtypes.

        Raises TensorError, EngineError.
        """
        published = self._published(reader, pace)
        digest = published.schema.digest
        if self._learnt is None or self._learnt[0] != digest:
            placement = self._learn(published.schema, published.tensors())
            filled = {n for n, found in [*placement.rects.items(), *placement.constants.items()] if found}
            filled |= placement.opaque.keys()
            self.plan = self._rehearse(placement, published)
            layout = plan_layout(
                self._pairs, self._place.device, self._rank, self._world, filled=filled, views=self.plan.views
            )
            lives = {path: [live] for path, live in self.plan.live.items()}
            for source, live in running(self._pairs, layout):
                lives.setdefault(source, []).append(live)
            self.layout = self._place.arranged(layout, lives)
            kernels = self.layout.kernels
            self._private = {s.source for s in self._pairs if s.role == "linear" and kernels[s.name] == "private"}
            self._learnt = (digest, placement)
        return self.layout

    def _published(self, reader: SlotReader, pace: Pace, threads: int = 0) -> Published:
        return Published(reader, pace, allow_non_finite=self._allow_non_finite, share=self._share, threads=threads)

    def reads(self, schema: Schema) -> Reads:
        """This worker's reads of versions with this schema, learnt as for a staging, over memory that nobody fills.

        Raises TensorError, EngineError.
        """
        placement = self._learn(schema, blank_tensors(schema))
        rows = {name: max(1, spec.nbytes // max(1, matrix(spec.shape)[0])) for name, spec in schema.tensors.items()}
        ranges = {
            (rect.name, rect.source.row * rows[rect.name], (rect.source.row + rect.source.rows) * rows[rect.name])
            for rects in placement.rects.values()
            for rect in rects
        }
        whole = {name for names in placement.opaque.values() for name in names}
        ranges |= {(name, 0, schema.tensors[name].nbytes) for name in whole}
        unread = sorted(set(placement.unused) - whole)
        return Reads(Slices.of(schema, ranges), tuple(unread))

    def _learn(self, schema: Schema, tensors: dict[str, torch.Tensor]) -> Placement:
        layers = self._processing.layers if self._processing is not None else ()
        if self._processing is not None:
            self._processing.begin(layers, self._place.twin)
        try:
            groups = group_by_layer(schema.tensors)
            placement = learn(self._twin, self._pairs, tensors, groups)
            if made := pair_made(self._pairs):
                self._adopt(made)
                placement = learn(self._twin, self._pairs, tensors, groups)
        finally:
            if self._processing is not None:
                self._processing.drop(layers)
        return placement

    def _adopt(self, made: list[Pair]) -> None:
        """Parameters that this version brought into being; the model that runs gets them when it is committed."""
        if not self._place.replaces:
            raise unsupported_model(
                f"{made[0].name!r} is made when a version is loaded, and captured graphs lack it: versions of this "
                "model are swapped on CPUs alone"
            )
        self._pairs += made  # which the stager reads, too
        self._own |= {pair.name: pair for pair in made}
        self._shapes |= {pair.name: pair.parameter.shape for pair in made}

    def build(self, reader: SlotReader, data: torch.Tensor | None, pace: Pace, also: Collection[str] = ()) -> Built:
        """Fill `data`, the layout slot's bytes (None: they are there already), and make the private kernels.

        Tensors that nothing here is filled from are summed, too; of a part of a slot only those in `also`. Raises
        TensorError when one is missing, when published bytes changed, have a NaN or an infinity, or overflow in the
        type they are served in, or when what was built is not what was published; EngineError.
        """
        self.prepare(reader, pace)
        with self._published(reader, pace, self._threads) as published:
            return self._build(published, data, reader, also)

    def _build(
        self, published: Published, data: torch.Tensor | None, reader: SlotReader, also: Collection[str]
    ) -> Built:
        built, placement = Built(), self._placement
        for entry in self._entries(placement) if data is not None else ():
            assert data is not None
            self._fill(entry, placement, published, data, built)
        for source in sorted(self._private - placement.opaque.keys()):
            raw = self._raw(source, placement, published)
            self._sum_plain(raw, source, placement, published, built)
            built.private[source] = private_linear(raw)
        self._load_opaque(placement, published, data, built)
        built.scalars |= {p: value for moved in self.plan.moved.values() for p, value in moved.scalars.items()}
        for layer in self._layers if data is not None else self._private_layers():
            if layer not in self.plan.moved:
                self._process(layer, placement, published, data, built)
        self._sum_unused(placement, published, built, also)
        published.finish()
        compare(built.sums(), reader.manifest.tensors)
        return built

    def check(self, reader: SlotReader, data: torch.Tensor, also: Collection[str] = ()) -> TileSums:
        """Read `data` again: the sums of what lies there now, as `build` reported them if nothing changed since."""
        self.prepare(reader, lambda _: None)
        published, built = Published(reader, lambda _: None, allow_non_finite=True), Built()
        placement = self._placement
        for entry in self._entries(placement):
            if entry.packed:
                self._sum_packed(entry, placement, published, data, built)
            else:
                self._sum_plain(entry.view(data), entry.source, placement, published, built)
        for rect in (rect for name in self._unmoved for rect in placement.rects.get(name, ())):
            built.parts.append((rect.name, published.part(rect, 0), published.sum(rect)))
        self._sum_unused(placement, published, built, also)
        return built.sums()

    def digest(self, data: torch.Tensor, built: Built, pace: Pace) -> str:
        """Of what processing made of a version: the tensors in `data` and the scalars; "" where it made nothing.

        Published bytes do not determine it, so no checksum covers it. It is equal wherever the same code runs on the
        same kind of processor.
        """
        moved = {path for layer in self.plan.moved.values() for path in layer.moves}
        sums = {}
        for path, view in self.layout.views.items():
            if path not in moved:
                pace(0)
                sums[path] = sum_of(view.of(data))
        found = {path: int(total) & MASK for path, total in sums.items()}
        text = json.dumps([found, built.scalars], sort_keys=True)
        return xxhash.xxh3_64_hexdigest(text.encode()) if found or built.scalars else ""

    @property
    def _placement(self) -> Placement:
        assert self._learnt is not None
        return self._learnt[1]

    def _entries(self, placement: Placement) -> Iterator[Entry]:
        """The entries that are filled from published words alone."""
        yield from (entry for entry in self.layout.entries if entry.source not in placement.opaque)
        for moved in self.plan.moved.values():
            for path, move in moved.moves.items():
                yield move.entry(self._shapes[move.source], self.layout.views[path])

    @property
    def _unmoved(self) -> list[str]:
        """The processed parameters whose words do not lie in the slot."""
        moved = {move.source for layer in self.plan.moved.values() for move in layer.moves.values()}
        return sorted(self._processed - moved)

    # filling ----------------------------------------------------------------------------------------------------------

    def _fill(self, entry: Entry, placement: Placement, published: Published, data: torch.Tensor, built: Built) -> None:
        target, rects = as_matrix(entry.view(data)), placement.rects[entry.source]
        constants = placement.constants.get(entry.source, ())
        boxes = [*(rect.target for rect in rects), *(box for box, _ in constants)]
        if entry.packed and not (
            all(in_blocks(box, entry) for box in boxes)
            and all(published.dtype(rect.name) is target.dtype for rect in rects)
        ):
            pack_into(target, as_matrix(self._raw(entry.source, placement, published)), entry.lanes, entry.word)
            return self._sum_packed(entry, placement, published, data, built)
        for box, value in constants:
            crop(target, box).fill_(value)
        for rect in rects:
            total: Sum = 0
            for piece in self._pieces(rect, published, entry.lanes or 1):
                published.read(piece.name, piece.source)
                total = total + (
                    self._pack(entry, piece, published, data)
                    if entry.packed
                    else self._copy(target, entry.source, piece, published)
                )
            built.parts.append((rect.name, published.part(rect, 0), total))
        return None

    def _pack(self, entry: Entry, piece: Rect, published: Published, data: torch.Tensor) -> int:
        words, first = published.words(piece.name, piece.source), published.first_word(piece.name, piece.source)
        return pack_rectangle(words, packed_words(entry, piece.target, data), piece.source.row, first)

    def _copy(self, target: torch.Tensor, parameter: str, piece: Rect, published: Published) -> Sum:
        view, served = crop(target, piece.target), self._own[parameter].parameter.dtype
        if view.dtype is served is published.dtype(piece.name):
            words = published.words(piece.name, piece.source)
        else:  # by way of the type that the model has: a bias is wider here
            source = crop(as_matrix(published.tensor(piece.name)), piece.source)
            words = words_of(published.cast(piece.name, source, served).to(view.dtype).contiguous()).numpy()
        self._place.copy(view, words)
        return self._sum(view, piece, parameter, published)

    def _pieces(self, rect: Rect, published: Published, lanes: int = 1) -> Iterator[Rect]:
        return pieces(rect, published.row_nbytes(rect.name), self._place.piece_nbytes, lanes)

    def _raw(self, source: str, placement: Placement, published: Published) -> torch.Tensor:
        """The parameter as vLLM's loader would have filled it: in the published slot itself if it lies there so."""
        pair, rects = self._own[source], placement.rects[source]
        shape, dtype = self._shapes[source], pair.parameter.dtype
        for rect in rects:
            published.read(rect.name, rect.source)
        first = rects[0] if len(rects) == 1 and not placement.constants.get(source) else None
        if first is not None and published.dtype(first.name) is dtype:
            view = crop(as_matrix(published.tensor(first.name)), first.source)
            if view.is_contiguous():
                return view.view(shape)
        raw = self._scratch.setdefault((shape, dtype), torch.empty(shape, dtype=dtype))
        for box, value in placement.constants.get(source, ()):
            crop(as_matrix(raw), box).fill_(value)
        for rect in rects:
            source_part = crop(as_matrix(published.tensor(rect.name)), rect.source)
            crop(as_matrix(raw), rect.target).copy_(published.cast(rect.name, source_part, dtype))
        return raw

    def _load_opaque(self, placement: Placement, published: Published, data: torch.Tensor | None, built: Built) -> None:
        opaque = placement.opaque.keys() - self._processed
        self._load(sorted(opaque), placement, published)
        for source in sorted(opaque):
            raw = self._own[source].parameter.data
            if raw.is_floating_point() and not (published.allow_non_finite or all_finite(raw)):
                raise not_finite(source, str(raw.dtype).removeprefix("torch."))
            for entry in self.layout.entries if data is not None else ():
                if entry.source == source:
                    assert data is not None
                    target = entry.view(data)
                    pack_into(target, raw, entry.lanes, entry.word) if entry.packed else target.copy_(raw)
            if source in self._private:
                built.private[source] = private_linear(raw)

    def _load(self, opaque: list[str], placement: Placement, published: Published) -> None:
        """Have vLLM's loader fill these parameters of the twin."""
        names = dict.fromkeys(name for source in opaque for name in placement.opaque[source])
        for name in names:
            published.read(name, published.whole(name))
        if names:
            load_group(self._twin, ((name, published.tensor(name)) for name in names))

    # processing -------------------------------------------------------------------------------------------------------

    @property
    def _layers(self) -> Iterable[str]:
        return self._processing.layers if self._processing is not None else ()

    def _private_layers(self) -> list[str]:
        private = {layer_of(root) for root in self.plan.private}
        return [layer for layer in self._layers if layer in private]

    def _rehearse(self, placement: Placement, published: Published) -> Plan:
        """Process every layer once, to see what comes of it. Nothing is kept but the shapes."""
        plan, end = Plan(), 0
        first: dict[Any, tuple[str, Moved | None]] = {}  # layers of one form are processed alike
        for layer in self._layers:
            form = self._form(layer, placement)
            known = first.get(form, (layer, None))
            expected = None if known[1] is None else known[1].at(known[0], layer)
            made = self._rehearse_layer(layer, placement, None if expected is not None else published, plan)
            moved = expected
            if form not in first:
                moved = self._watch_words(layer, placement)
                first[form] = layer, moved
            scalars = {path: scalar.value for path, scalar in plan.scalars.items() if layer_of(path) == layer}
            if moved is not None and moved.moves.keys() == made.keys() and moved.scalars == scalars:
                plan.moved[layer] = moved
            elif expected is not None:
                made = self._rehearse_layer(layer, placement, published, plan)
            views, end = place_views(made, end)
            plan.views |= views
        return plan

    def _rehearse_layer(
        self, layer: str, placement: Placement, published: Published | None, plan: Plan
    ) -> dict[str, torch.Tensor]:
        """Process one layer, with its weights or with whatever lies in the memory; returns the tensors made."""
        assert self._processing is not None
        if published is None:
            self._processing.begin([layer], self._place.device)
        else:
            self._load_layer(layer, placement, published, Built())
        made: dict[str, torch.Tensor] = {}
        for root, changes in self._processing_of(layer).items():
            try:
                leaves, scalars = in_place(changes)
            except NotInPlace as error:
                self._refuse_private(root, error)
                plan.private[root] = str(error)
                continue
            made |= {leaf.path: leaf.made for leaf in leaves}
            plan.live |= {leaf.path: leaf.live for leaf in leaves}
            plan.scalars |= {scalar.path: scalar for scalar in scalars}
        return made

    def _form(self, layer: str, placement: Placement) -> tuple[Any, ...]:
        """The facts that decide how a layer is processed, but for its weights."""
        assert self._processing is not None
        modules = {name: self._processing.modules[name] for name in self._processing.layers[layer]}
        kinds = [(n.removeprefix(layer), type(m), type(getattr(m, "quant_method", None))) for n, m in modules.items()]
        names = self._processed_in.get(layer, [])
        parameters = [
            (n.removeprefix(layer), self._shapes[n], self._own[n].parameter.dtype, bool(placement.rects.get(n)))
            for n in names
        ]
        return tuple(kinds), tuple(parameters)

    def _watch_words(self, layer: str, placement: Placement) -> Moved | None:
        """Have random words processed. None where that makes anything else of them than another order."""
        names = self._processed_in.get(layer, [])
        if not all(placement.rects.get(name) for name in names):
            return None
        assert self._processing is not None
        self._processing.begin([layer], self._place.device)
        loaded = random_words({name: self._own[name].parameter.data for name in names})
        try:
            made = [in_place(changes) for changes in self._processing_of(layer).values()]
        except Exception:  # of vLLM's, about values that no checkpoint has
            self._processing.drop([layer])
            return None
        moves = recognise(loaded, [leaf for leaves, _ in made for leaf in leaves])
        if moves is None or {move.source for move in moves.values()} != set(names):
            return None
        return Moved(moves, {s.path: s.value for _, scalars in made for s in scalars})

    def _refuse_private(self, root: str, error: Exception) -> None:
        """Captured graphs hold the addresses of an accelerator's weights: nothing there can be replaced."""
        if not self._place.replaces:
            raise unsupported_model(f"layer {root!r} cannot be swapped under captured graphs: {error}")

    def _process(
        self, layer: str, placement: Placement, published: Published, data: torch.Tensor | None, built: Built
    ) -> None:
        """Have vLLM load and process a layer; what other instances can map goes into the slot."""
        self._load_layer(layer, placement, published, built)
        for root, changes in self._processing_of(layer, published.pause).items():
            if root in self.plan.private:
                built.changes += changes
                continue
            try:
                leaves, scalars = in_place(changes)
            except NotInPlace as error:
                raise unsupported_model(f"version differs from the one that runs: {error}; restart on it") from None
            for leaf in leaves if data is not None else ():
                view = self.layout.views.get(leaf.path)
                if view is None or self.plan.live[leaf.path] is not leaf.live:
                    raise unsupported_model(f"{leaf.path} was not there in the first version; restart on this one")
                view.of(data).copy_(leaf.made)
            for scalar in scalars if not self._place.replaces else ():
                if not same(held := scalar.holder[scalar.key], scalar.value):
                    raise unsupported_model(
                        f"{scalar.path} is {scalar.value} in this version, and captured graphs hold {held}, with which "
                        "the instance started: publish versions with that number, or start an instance with --model on "
                        "a checkpoint that has the other one"
                    )
            built.scalars |= {scalar.path: scalar.value for scalar in scalars}

    def _load_layer(self, layer: str, placement: Placement, published: Published, built: Built) -> None:
        """Fill a layer of the twin as vLLM's loader would."""
        assert self._processing is not None
        self._processing.begin([layer], self._place.device)
        names = self._processed_in.get(layer, [])
        for name in names:
            target = self._own[name].parameter.data
            for box, value in placement.constants.get(name, ()):
                crop(as_matrix(target), box).fill_(value)
            for rect in placement.rects.get(name, ()):
                total: Sum = 0
                for piece in self._pieces(rect, published):
                    published.read(piece.name, piece.source)
                    total = total + self._copy(as_matrix(target), name, piece, published)
                built.parts.append((rect.name, published.part(rect, 0), total))
        self._load([name for name in names if name in placement.opaque], placement, published)

    def _processing_of(self, layer: str, pause: Callable[[], None] = lambda: None) -> dict[str, list[Change]]:
        """Have vLLM process a filled layer, and return what came of it by module."""
        assert self._processing is not None
        self._processing.process(layer, pause)
        return self._processing.harvest(layer)

    # summing ----------------------------------------------------------------------------------------------------------

    def _sum(self, view: torch.Tensor, rect: Rect, source: str, published: Published) -> Sum:
        """Of what lies in `view`, in terms of the published type."""
        dtype = published.dtype(rect.name)
        served = self._own[source].parameter.dtype
        if served is not dtype and (dtype, served) not in LOSSLESS:
            return published.sum(rect)
        return sum_as(view, dtype, rect.source.row, published.first_word(rect.name, rect.source))

    def _sum_plain(
        self, tensor: torch.Tensor, source: str, placement: Placement, published: Published, built: Built
    ) -> None:
        for rect in placement.rects[source]:
            total = self._sum(crop(as_matrix(tensor), rect.target), rect, source, published)
            built.parts.append((rect.name, published.part(rect, 0), total))

    def _sum_packed(
        self, entry: Entry, placement: Placement, published: Published, data: torch.Tensor, built: Built
    ) -> None:
        for rect in placement.rects[entry.source]:
            if published.dtype(rect.name) is self._own[entry.source].parameter.dtype and in_blocks(rect.target, entry):
                total: Sum = 0
                for piece in self._pieces(rect, published, entry.lanes):
                    first = published.first_word(piece.name, piece.source)
                    total += packed_rectangle(packed_words(entry, piece.target, data), piece.source.row, first)
            else:
                total = self._sum(crop(unpacked(entry, data), rect.target), rect, entry.source, published)
            built.parts.append((rect.name, published.part(rect, 0), total))

    def _sum_unused(self, placement: Placement, published: Published, built: Built, also: Collection[str]) -> None:
        here = {name for names in placement.opaque.values() for name in names} | set(also)
        for name in placement.unused:
            if published.is_part and name not in here:
                continue
            rect = Rect(published.whole(name), published.whole(name), name)
            published.read(name, rect.source)
            built.parts.append((name, published.part(rect, 0), published.sum(rect)))
