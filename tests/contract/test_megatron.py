"""The names of Megatron-Core that the trainer leans on, in every release that it works with.

The installed release is asked by its sources, and so is any other, which pip brings. A failure here after an upgrade
names what moved; code asks `trainer/megatron/releases.py` for what is elsewhere.
"""

from __future__ import annotations

import pytest

from tests.contract.release import Sources, has, imported, sources, takes
from trainer.errors import ModelError
from trainer.megatron import releases

OPTIMIZER, CHECKPOINTS = "megatron.core.optimizer", "megatron.core.dist_checkpointing"
MOE = "megatron.core.transformer.moe"


@pytest.fixture(scope="module", params=releases.MEGATRON_VERSIONS)
def megatron(request: pytest.FixtureRequest) -> Sources:
    return sources("megatron", "megatron-core", request.param, releases.release())


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("0.17.0", "0.19.2rc1", None):
        monkeypatch.setattr(releases, "installed", lambda found=found: found)
        with pytest.raises(ModelError, match=r"0\.16\.1 or 0\.19\.2") as refused:
            releases.release.__wrapped__()
        assert (f"{found} is" if found else "not installed") in str(refused.value)


def test_every_imported_name(megatron: Sources) -> None:
    names = sorted(imported("megatron"))
    assert len(names) > 30
    assert not [name for name in names if not megatron.has(name)]


def test_the_model(megatron: Sources) -> None:
    """Names that attention.py and model.py put in, and override."""
    gpt = "megatron.core.models.gpt.gpt_model:GPTModel"
    takes(megatron, f"{gpt}.forward", "..., input_ids, position_ids, attention_mask, labels, padding_mask")
    takes(megatron, f"{gpt}._postprocess", "..., hidden_states, labels")
    has(megatron, f"{gpt}.forward", "self._postprocess(", "hidden_states=hidden_states", "labels=labels")
    has(megatron, f"{gpt}.__init__", "self.rotary_pos_emb = RotaryEmbedding(")
    assert megatron.has("megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_emb")
    blocks = "megatron.core.transformer.transformer_block"
    assert {"layer_specs", "layer_norm"} <= megatron.attributes(f"{blocks}:TransformerBlockSubmodules")
    specs = megatron.source("megatron.core.models.gpt.gpt_layer_specs:get_mlp_module_spec_for_backend")
    assert ("partial(" in specs) == (megatron.version != "0.16.1")  # releases.feed_forward


def test_routers(megatron: Sources) -> None:
    """Names that router.py and shim.py override."""
    for name in ("routing", "apply_z_loss"):
        takes(megatron, f"{MOE}.router:TopKRouter.{name}", "self, logits, padding_mask")
    has(megatron, f"{MOE}.router:TopKRouter.routing", "self.apply_z_loss(", "router_replay=self.router_replay")
    has(megatron, f"{MOE}.moe_utils:topk_routing_with_score_function", "router_replay.get_replay_topk(")
    takes(megatron, f"{MOE}.moe_utils:maybe_move_tensor_to_cpu", "tensor, as_numpy, record_stream")
    assert megatron.has(f"{MOE}.token_dispatcher:maybe_move_tensor_to_cpu")
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        assert megatron.has(f"megatron.core.tensor_parallel.random:{name}")


def test_the_optimizer(megatron: Sources) -> None:
    """Names that optimizer.py and muon.py override and look into."""
    host = f"{OPTIMIZER}.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
    takes(megatron, f"{host}._get_sub_optimizer_param_groups", "self, offload_fraction")
    maps = ("cpu_param_groups", "gpu_param_groups", "gpu_params_map_cpu_copy", "cpu_copys_map_gpu_param")
    in_order = ",\n            ".join(f"self.{name}" for name in (*maps, "param_to_fp32_param,"))
    has(megatron, f"{host}._init_sub_optimizers", in_order, "self.param_to_inner_param[param] = inner_param")
    has(megatron, f"{host}._sync_sub_optimizers_state_to_hdo", '["master_param"] = param')
    has(megatron, f"{host}._sync_hdo_state_to_sub_optimizers", "self._update_fp32_params_by_new_state()")
    has(megatron, f"{host}._set_sub_optimizer_grads", '"decoupled_grad"')
    options = {"optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"}
    assert options <= megatron.attributes(f"{OPTIMIZER}.optimizer_config:OptimizerConfig")
    sharded = f"{OPTIMIZER}.distrib_optimizer:DistributedOptimizer"
    takes(megatron, f"{sharded}._set_main_param_and_optimizer_states", "self, model_param, tensors")
    takes(megatron, f"{sharded}._get_model_param_range_map", "self, param")
    has(megatron, sharded, "self.model_param_group_index_map", "self.data_parallel_group = ", "self.buffers = ")
    has(megatron, "megatron.core.distributed.param_and_grad_buffer", "self.numel_unpadded = ", "self.grad_data")


def test_checkpoints(megatron: Sources) -> None:
    """Checkpoints that shards.py stops half way, and reads through a reader of its own."""
    strategies = f"{CHECKPOINTS}.strategies.torch"
    for name in ("save", "load"):
        given = "sharded_state_dict, checkpoint_dir, sharded_strategy, ..."
        takes(megatron, f"{CHECKPOINTS}.serialization:{name}", given)
    has(megatron, f"{CHECKPOINTS}.serialization:save", "sharded_strategy.save(sharded_state_dict, checkpoint_dir)")
    for name in ("_replace_state_dict_keys_with_sharded_keys", "mcore_to_pyt_state_dict", "MCoreSavePlanner"):
        assert megatron.has(f"{strategies}:{name}")
    assert megatron.has(f"{strategies}:_get_filesystem_reader")
    newer = megatron.version != "0.16.1"
    assert megatron.has(f"{CHECKPOINTS}.serialization:_get_filesystem_reader") == newer  # releases.reading_with
    assert megatron.has(f"{CHECKPOINTS}.strategies.common:TorchCommonLoadStrategy") != newer
