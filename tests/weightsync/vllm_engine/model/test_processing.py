"""Layers that vLLM processes after loading: every kind of model, after flips and rollbacks, against a fresh load."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor import model_loader

from loadtest.architectures.tiny import make_versions
from loadtest.models.checkpoints import TINY_SHAPE
from loadtest.models.equality import differences, flipping, fresh, publish, swap, tensors_of
from loadtest.models.kinds import KINDS, Kind, make_kind
from loadtest.models.vllm_worker import worker
from tests.cpu import of_kinds
from weightsync import Publisher
from weightsync.format.fingerprint import combine
from weightsync.vllm_engine.device.pacing import Unpaced
from weightsync.vllm_engine.loader import PlaceholderLoader
from weightsync.vllm_engine.model.processing import Change, NotInPlace, Processing, in_place
from weightsync.vllm_engine.staging.stager import StageOrder

pytestmark = pytest.mark.engine
WAYS = ("pointed", "copied", "remapped")
REPLACED = {"w4a16", "w8a8", "w8a8-bias", "w8a8-kv"}  # of these a commit on a CPU replaces kernels, or numbers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(kind) -> two versions of it, made once."""
    made: dict[str, list[Path]] = {}

    def of(kind: str) -> list[Path]:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            made[kind] = [make_kind(path / str(seed), kind, seed=seed) for seed in (0, 1)]
        return made[kind]

    return of


def worker_of(kind: str, checkpoint: Path) -> Any:
    return worker(checkpoint, dtype=KINDS[kind].dtype, quantization=KINDS[kind].vllm.get("quantization"))


@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", of_kinds(sorted(KINDS)))
@pytest.mark.parametrize("how", WAYS)
def test_a_swapped_model_equals_a_loaded_one(how: str, kind: str, checkpoints: Any, publisher: Publisher) -> None:
    """After each flip, a rollback, and a third version; and what every worker reports is what was published.

    "copied" and "remapped" flip as on an accelerator: what is not replaced as a whole keeps its address.
    """
    versions = [tensors_of(path) for path in checkpoints(kind)]
    with flipping(how), worker_of(kind, checkpoints(kind)[0]) as w:
        assert not [(step, wrong) for step, wrong in swap(w, publisher, versions, how) if wrong]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", of_kinds(sorted(KINDS.keys() - REPLACED)))
@pytest.mark.parametrize("how", WAYS[1:])
def test_a_model_under_captured_graphs_equals_a_loaded_one(
    how: str, kind: str, checkpoints: Any, publisher: Publisher
) -> None:
    """As on a GPU: no attribute is replaced, and all that changes is copied or mapped to where it was."""
    versions = [tensors_of(path) for path in checkpoints(kind)]
    with flipping(how, captured=True), worker_of(kind, checkpoints(kind)[0]) as w:
        assert not [(step, wrong) for step, wrong in swap(w, publisher, versions, how) if wrong]


@pytest.mark.parametrize(("kind", "why"), [("w8a8", "dnnl_handler is a"), ("w4a16", "_scale_float is")])
def test_what_captured_graphs_hold_is_not_replaced(kind: str, why: str, checkpoints: Any, publisher: Publisher) -> None:
    """A kernel that keeps its weights to itself, and a number that a graph took in."""
    record = publish(publisher, tensors_of(checkpoints(kind)[1]))
    refused = pytest.raises(AssertionError, match=f"(?=.*captured graphs)(?=.*{why})")
    with flipping("copied", captured=True), worker_of(kind, checkpoints(kind)[0]) as w, refused:
        w.stage(record)


def _scales(tensors: Any, seed: int) -> Iterator[tuple[str, Any]]:
    yield from tensors
    for layer, name in itertools.product(range(TINY_SHAPE["num_hidden_layers"]), "kv"):
        yield f"model.layers.{layer}.self_attn.{name}_scale", torch.tensor([(0.07, 0.07, 0.12)[seed]])


def _scaled_cache(_tensors: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}


def test_captured_graphs_hold_the_scales_that_the_checkpoint_has(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance starts with them, so versions that have them can be served; others say what would help."""
    monkeypatch.setitem(KINDS, "kv", Kind("LlamaConfig", edit=_scales, quantization=_scaled_cache))
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "dummy", PlaceholderLoader)
    first, second, other = (make_kind(tmp_path / str(seed), "kv", seed=seed) for seed in (0, 1, 2))
    with flipping("copied", captured=True), worker(first) as w:
        assert not [
            (step, wrong) for step, wrong in swap(w, publisher, [*map(tensors_of, (first, second))], "") if wrong
        ]
        assert w.model.model.layers[0].self_attn.attn._k_scale_float == pytest.approx(0.07)
        record = publish(publisher, tensors_of(other))
        with pytest.raises(AssertionError, match=r"_k_scale_float is 0\.11.*graphs hold 0\.07.*--model on"):
            w.stage(record)


def test_layers_are_processed_in_scratch_and_versions_lie_elsewhere(
    checkpoints: Any, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch stays with its pool for as long as a worker is awake: what is kept must not be made there."""
    seen: list[tuple[str, bool]] = []
    record = publish(publisher, tensors_of(checkpoints("moe")[0]))
    with flipping("copied"), worker_of("moe", checkpoints("moe")[0]) as w:
        place, inside = w.stager.place, [False]

        @contextlib.contextmanager
        def scratch() -> Iterator[None]:
            inside[0] = True
            yield
            inside[0] = False

        def noting(owner: Any, name: str) -> None:
            call = getattr(owner, name)

            def noted(*args: Any) -> Any:
                seen.append((name, inside[0]))
                return call(*args)

            monkeypatch.setattr(owner, name, noted)

        monkeypatch.setattr(place, "scratch", scratch)
        noting(w.stager._builder._processing, "process")
        noting(place, "acquire")
        w.stage(record)
    assert dict(seen) == {"process": True, "acquire": False}
    assert seen.count(("process", True)) == len(seen) - 1


@pytest.mark.parametrize("how", WAYS)
def test_a_view_that_another_layer_holds_follows(how: str, publisher: Publisher, tmp_path: Path) -> None:
    """A Mamba2 mixer computes on a view of the weight of its convolution, whose layer vLLM packs."""
    versions = make_versions(tmp_path, "Mamba2ForCausalLM")
    with flipping(how), worker(tmp_path) as w:
        assert not [(step, wrong) for step, wrong in swap(w, publisher, versions, how) if wrong]
        assert "backbone.layers.0.mixer.conv_weights" in w.stager._builder.plan.live


def test_a_bias_that_comes_with_a_version_is_served(publisher: Publisher, tmp_path: Path) -> None:
    """vLLM gives the head of a model that transformers runs a bias when it finds one in the checkpoint."""
    versions = make_versions(tmp_path, "PhiForCausalLM")
    with worker(tmp_path) as w:
        assert w.model.lm_head.bias is None
        assert not [(step, wrong) for step, wrong in swap(w, publisher, versions, "pointed") if wrong]
        assert torch.equal(w.model.lm_head.bias.bfloat16(), versions[0]["lm_head.bias"])


def test_a_model_that_pools_needs_no_head(publisher: Publisher, tmp_path: Path) -> None:
    """vLLM makes one, and runs it never."""
    versions = make_versions(tmp_path, "JambaForSequenceClassification")
    assert "lm_head.weight" not in versions[0]
    with worker(tmp_path) as w:
        assert "lm_head.weight" in dict(w.model.named_parameters())
        assert not [(step, wrong) for step, wrong in swap(w, publisher, versions, "pointed") if wrong]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", of_kinds(["moe", "w8a8-kv", *sorted(KINDS.keys() - {"moe", "w8a8-kv"})]))
def test_a_second_instance_maps_what_the_first_one_built(
    kind: str, checkpoints: Any, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes tensors and scalars from the slot; it neither loads nor processes a layer that can lie there."""
    checkpoint = checkpoints(kind)[1]
    tensors = tensors_of(checkpoint)
    dtype = getattr(torch, KINDS[kind].dtype)
    with worker_of(kind, checkpoint) as first, worker_of(kind, checkpoint) as second:
        reference = fresh(second, tensors)
        one = first.stage(publish(publisher, tensors))
        second.stage(publish(publisher, {n: t + 1 if "norm" in n else t for n, t in tensors.items()}))
        if not second.stager._builder.has_private:
            monkeypatch.setattr(second.stager._builder, "build", None)  # it is not called
        two = second.stage(publisher.versions()[0])
        assert one.slot.path == two.slot.path
        assert combine([second.stager.report.sums]) == combine([first.stager.report.sums])
        assert second.stager.report.built == first.stager.report.built
        two.commit()
        assert not differences(second.model, reference, dtype)


@pytest.mark.parametrize("how", WAYS)
def test_a_digest_tells_what_processing_made(
    how: str, checkpoints: Any, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal wherever it was built right, and another one where a single bit is wrong, which no checksum can see."""
    record = publish(publisher, tensors_of(checkpoints("awq")[0]))
    process, fault = Processing.process, SimpleNamespace(on=False)

    def once_wrong(self: Processing, layer: str, *pause: Any) -> None:
        process(self, layer, *pause)
        if fault.on:
            made = (p for name in self.layers[layer] for p in self.modules[name]._parameters.values())
            next(p for p in made if p is not None and p.numel()).data.view(-1).view(torch.uint8)[0] ^= 1

    monkeypatch.setattr(Processing, "process", once_wrong)
    found = []
    for fault.on in (False, False, True):
        with flipping(how), worker(checkpoints("awq")[0]) as w:
            w.stage(record).release()
            found.append(w.stager.report)
        for slot in Path(record.slot).parent.glob("layout-*"):
            slot.unlink()
    assert found[0].built.count(":") == 1
    assert found[0].built == found[1].built != found[2].built
    assert all(combine([report.sums]) == record.fingerprint for report in found)


def test_a_layer_that_vllm_processes_is_processed_in_pieces(checkpoints: Any, publisher: Publisher) -> None:
    """A staging can wait, or be stopped, between any two of its operators; then another one begins anew."""
    first, later = (publish(publisher, tensors_of(path)) for path in checkpoints("awq"))

    class StopsIn(Unpaced):
        """Ends the staging at the `last` pause in which nothing is read, if there is to be one."""

        def __init__(self, last: int | None) -> None:
            self.last, self.pauses, self.stop = last, 0, threading.Event()

        def __call__(self, nbytes: int) -> None:
            self.pauses += not nbytes
            if self.pauses == self.last:
                self.stop.set()

    with worker(checkpoints("awq")[0]) as w:
        w.stage(first).commit()
        outcomes = []
        for pacer in (StopsIn(30), StopsIn(31), StopsIn(None)):
            w.stager._pacer = pacer
            order = StageOrder(later.version, later.slot, later.manifest_digest)
            with contextlib.suppress(AssertionError):
                generation = w.build(order, pacer.stop)
            outcomes.append((w.stager.report.error or {}).get("code"))
        assert outcomes == ["staging_cancelled", "staging_cancelled", None]
        assert pacer.pauses > 100, "operators of every layer"
        assert combine([w.stager.report.sums]) == later.fingerprint
        generation.release()


def online_int8() -> str:
    """Registers, as a package of its own would, a method that takes bf16 and serves int8. Its kernel is private."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
    from vllm.model_executor.parameter import ModelWeightParameter
    from vllm.model_executor.utils import replace_parameter

    name = "hotswap_test_int8"
    if name in QUANTIZATION_METHODS:
        return name

    class Method(LinearMethodBase):  # type: ignore[misc]
        uses_meta_device = True

        def create_weights(
            self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], **more: Any
        ) -> None:
            rows = sum(output_partition_sizes)
            data = torch.empty(rows, input_size_per_partition, device="meta", dtype=torch.bfloat16)
            loader = more["weight_loader"]
            weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter("weight", weight)
            initialize_online_processing(layer)

        def process_weights_after_loading(self, layer: Any) -> None:
            if getattr(layer, "_already_called_process_weights_after_loading", False):
                return
            wide = layer.weight.data.float()
            scale = (wide.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
            narrow = (wide / scale).round().clamp(-127, 127).to(torch.int8)
            replace_parameter(layer, "weight_scale", scale)
            self.rows = narrow.shape[0]
            self.handler = ops.create_onednn_scaled_mm(narrow.t(), scale, torch.get_default_dtype(), True, False, 32)
            replace_parameter(layer, "weight", torch.empty(0))
            layer._already_called_process_weights_after_loading = True

        def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            flat = x.reshape(-1, x.shape[-1])
            quantized, scales, zero = ops.onednn_scaled_int8_quant(flat, None, None, True)
            out = torch.empty((flat.shape[0], self.rows), dtype=x.dtype)
            ops.onednn_scaled_mm(self.handler, quantized, out, scales, zero, None, bias)
            return out.reshape(*x.shape[:-1], self.rows)

    @register_quantization_config(name)
    class Config(QuantizationConfig):  # type: ignore[misc]
        def get_name(self) -> str:
            return name

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, _config: dict[str, Any]) -> Config:
            return cls()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return Method() if isinstance(layer, LinearBase) and not prefix.endswith("lm_head") else None

    return name


def test_a_method_of_another_package_that_quantizes_what_it_is_given(checkpoints: Any, publisher: Publisher) -> None:
    """bf16 is published and int8 served, by kernels that keep raw pointers: they are replaced as a whole."""
    versions = [tensors_of(path) for path in checkpoints("llama")]
    with worker(checkpoints("llama")[0], quantization=online_int8()) as w:
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()

        def outputs() -> list[torch.Tensor]:
            layers = [m for m in w.model.modules() if getattr(m, "input_size_per_partition", 0) == 128]
            return [m.quant_method.apply(m, x, m.bias) for m in layers if hasattr(m.quant_method, "handler")]

        def expected(version: dict[str, torch.Tensor]) -> torch.Tensor:
            return x.float() @ version["model.layers.0.self_attn.o_proj.weight"].float().t()

        generations = [w.stage(publish(publisher, tensors)) for tensors in versions]
        assert w.stager._builder.plan.private
        seen = []
        for index in (0, 1, 0, 1):
            generations[index].commit()
            seen.append(outputs())
            exact = expected(versions[index])  # 1% away; 7% where oneDNN has no VNNI; the other version's: 130%
            assert (seen[-1][1].float() - exact).norm() < 0.1 * exact.norm()
        for first, again in ((0, 2), (1, 3)):
            assert all(torch.equal(a, b) for a, b in zip(seen[first], seen[again], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))


def changes(old: Any, new: Any) -> tuple[list[Any], list[Change]]:
    holder = {"x": old}
    return in_place([Change("layer.x", holder, "x", new)])


def test_what_can_be_copied_into_what_runs() -> None:
    weight, made = torch.zeros(2, 3), torch.ones(2, 3)
    leaves, scalars = changes([weight, 1], [made, 1])
    assert [(leaf.path, leaf.live is weight, leaf.made is made) for leaf in leaves] == [("layer.x[0]", True, True)]
    assert not scalars
    leaves, scalars = changes(0.5, 0.25)
    assert (leaves, [c.value for c in scalars]) == ([], [0.25])

    def kernel(tensor: torch.Tensor) -> Any:
        return lambda x: x @ tensor

    leaves, _ = changes(kernel(weight), kernel(made))
    assert [leaf.live is weight for leaf in leaves] == [True]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (torch.zeros(2), torch.zeros(3), r"layer.x is float32 \(3,\)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int8), "layer.x is int8"),
        (torch.zeros(2, 2), torch.zeros(2, 2).t(), "with strides"),
        ([torch.zeros(2)] * 2, [torch.zeros(2), torch.ones(2)], "the same tensor as"),
        ((1, 2), (1, 3), r"layer.x\[1\] is 3, and 2 runs"),
        (lambda x: x, lambda x: x + 1, "contents are its own"),
        ([], {}, "is a dict, and a list runs"),
        (SimpleNamespace(a=1), SimpleNamespace(a=2), "contents are its own"),
    ],
)
def test_what_cannot_is_named(old: Any, new: Any, reason: str) -> None:
    with pytest.raises(NotInPlace, match=reason):
        changes(old, new)


def quantisation(scale: torch.Tensor, clamp: float | None = None) -> Any:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    found = fp8_w8a8_moe_quant_config(w1_scale=scale, w2_scale=scale, block_shape=[128, 128])
    found.gemm1_clamp_limit = clamp
    return found


def test_vllm_s_own_caches_stay_in_what_runs() -> None:
    """A step asks a mixture's kernel for its `ocp_mx_scheme`, which is computed then and kept in the object."""
    runs, made = quantisation(torch.zeros(2)), quantisation(torch.ones(2))
    assert runs.ocp_mx_scheme is None
    assert runs.__dict__.keys() > made.__dict__.keys()
    leaves, _ = changes(runs, made)
    assert [(leaf.live is runs.w1_scale, leaf.made is made.w1_scale) for leaf in leaves] == [(True, True)]

    with pytest.raises(NotInPlace, match=r"_ocp_mx_scheme was computed while it ran, and layer.x.gemm1_clamp_limit"):
        changes(runs, quantisation(torch.ones(2), clamp=7.0))
    for held in (torch.zeros(1), 0.5, 3, True):  # each may have been computed from the scales, which change
        runs._ocp_mx_scheme = held
        reason = f"_ocp_mx_scheme was computed while it ran, and holds a {type(held).__name__}"
        with pytest.raises(NotInPlace, match=reason):
            changes(runs, made)
    with pytest.raises(NotInPlace, match="_ocp_mx_scheme is new"):
        changes(made, runs)
