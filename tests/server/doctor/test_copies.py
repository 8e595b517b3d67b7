"""Copies of a model on GPUs whose figures are made up: a commit's pause, and what they take from the KV cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from server.cli.app import app
from server.doctor import world as worlds
from server.doctor.checks.swap_pause import judge_pause
from server.doctor.plan import Model, rows, scratch_of, token_nbytes
from server.doctor.registry import Status
from server.doctor.world import Accelerator, World, find_accelerator
from tests.server.doctor.worlds import checkpoint, findings, host, only
from tests.server.nvml import of
from weightsync.format.manifest import Schema, TensorSpec
from weightsync.vllm_engine.device.mapping import FLIP_ENV
from weightsync.vllm_engine.device.room import COPIES_ENV, Room

# the pause

GPU = Accelerator("GPU", 80_000, 1.0, 20.0)  # bytes, and ms for each


def world(tmp_path: Path, ranks: int = 1, **environ: str) -> World:
    return host(tmp_path, tensor_parallel_size=ranks, environ=environ)


@pytest.mark.parametrize(
    ("nbytes", "status", "told"),
    [
        (10_000, "ok", ["3 copies", "the previous", "about 10000.0 ms"]),
        (15_000, "ok", ["2 copies", "about 15000.0 ms", "while a version is staged for 300000 ms"]),
        (29_000, "ok", ["1 copies", "about 29000.0 ms", "a rollback for 580000 ms"]),
        (40_000, "warn", ["0 copies", "pinned host memory", "about 800000 ms, and so does a rollback"]),
        (70_000, "fail", ["do not fit"]),
    ],
)
def test_the_pause_follows_from_where_versions_fit(
    tmp_path: Path, nbytes: int, status: Status, told: list[str]
) -> None:
    found = only([judge_pause(GPU, nbytes, world(tmp_path))], status).found
    assert all(text in found for text in told), found
    if status != "fail":
        assert f"{Room.of(GPU.nbytes, GPU.nbytes).copies(nbytes)} copies" in found, "as a worker counts"


def test_the_pause_is_that_of_the_part_that_an_instance_is_given(tmp_path: Path) -> None:
    """Another process on the device, a share of it, and a KV cache of a fixed size."""
    half = host(tmp_path, gpu_memory_utilization=0.45)
    assert "1 copies" in only([judge_pause(GPU, 12_000, half)], "ok").found
    held = Accelerator("GPU", 80_000, 1.0, 20.0, free=36_000)
    assert "1 copies" in only([judge_pause(held, 12_000, host(tmp_path))], "ok").found
    fixed = host(tmp_path, kv_cache_memory_bytes=30_000)
    assert "2 copies" in only([judge_pause(GPU, 12_000, fixed)], "ok").found
    asked = host(tmp_path, kv_cache_memory_bytes=30_000, environ={COPIES_ENV: "3"})
    assert "--kv-cache-memory-bytes" in only([judge_pause(GPU, 12_000, asked)], "fail").mend


@pytest.mark.parametrize(
    ("environ", "status", "told"),
    [
        ({COPIES_ENV: "0"}, "warn", "about 200000 ms"),
        ({COPIES_ENV: "1"}, "ok", "a rollback for 200000 ms"),
        ({COPIES_ENV: "7"}, "fail", "say auto"),
        ({FLIP_ENV: "remap"}, "ok", "3 versions lie on the device"),
        ({FLIP_ENV: "remap", COPIES_ENV: "2"}, "ok", "2 versions lie on the device"),
        ({FLIP_ENV: "remap", COPIES_ENV: "1"}, "fail", "no memory to flip to"),
        ({FLIP_ENV: "swap"}, "fail", "copy or remap"),
    ],
)
def test_the_settings_count(tmp_path: Path, environ: dict[str, str], status: Status, told: str) -> None:
    assert told in only([judge_pause(GPU, 10_000, world(tmp_path, **environ))], status).found


def test_copies_that_were_asked_for_and_do_not_fit(tmp_path: Path) -> None:
    assert "auto" in only([judge_pause(GPU, 30_000, world(tmp_path, **{COPIES_ENV: "3"}))], "fail").mend
    assert "more ranks" in only([judge_pause(GPU, 40_000, world(tmp_path, **{FLIP_ENV: "remap"}))], "fail").mend


def test_the_checkpoint_and_the_ranks_give_the_size(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 4)
    gpu = Accelerator("GPU", 80 << 20, 1e-6, 2e-5)
    given: dict[str, Any] = {"model_dir": model, "accelerator": lambda: gpu}
    assert "weights of 4 MiB on each of 1 rank" in only(findings("swap-pause", host(tmp_path, **given)), "ok").found
    found = only(findings("swap-pause", host(tmp_path, **given, tensor_parallel_size=4)), "ok").found
    assert "weights of 1 MiB on each of 4 rank" in found
    assert "about 1.0 ms" in found


def test_on_a_cpu_references_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(findings("swap-pause", host(tmp_path)), "skip")
    only(findings("swap-pause", host(tmp_path, model_dir=tmp_path / "absent")), "skip")
    monkeypatch.setattr(worlds, "torch_cuda", lambda: None)
    found = only(findings("swap-pause", host(tmp_path, model_dir=checkpoint(tmp_path / "m"))), "ok")
    assert "does not depend on its size" in found.found


def test_a_gpu_that_cannot_be_measured_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def occupied() -> Accelerator:
        raise torch.OutOfMemoryError("no memory left")

    model = checkpoint(tmp_path / "m")
    found = only(findings("swap-pause", host(tmp_path, model_dir=model, accelerator=occupied)), "skip")
    assert "no memory left" in found.found
    monkeypatch.setattr(worlds, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in only(findings("swap-pause", host(tmp_path, model_dir=model)), "skip").found


def test_a_gpu_that_a_server_fills_is_judged_by_its_size(tmp_path: Path) -> None:
    """Its times cannot be measured, and where versions wait can be told."""

    def occupied() -> Accelerator:
        raise torch.OutOfMemoryError("no memory left. GPU 0 has a total capacity of 1 GiB")

    given: dict[str, Any] = {"model_dir": checkpoint(tmp_path / "m"), "accelerator": occupied}
    found = only(findings("swap-pause", host(tmp_path, **given, gpus=lambda: of("GPU-8a", free=0))), "ok").found
    assert "room for 3 copies" in found
    assert "stalls decoding for an unknown time" in found
    assert found.endswith("(times could not be measured: no memory left)")


@pytest.mark.gpu
def test_this_gpu_is_measured() -> None:
    found = find_accelerator()
    assert found is not None
    assert found.ms_per_byte is not None
    assert found.ms_per_byte_from_host is not None
    assert 0 < found.ms_per_byte < found.ms_per_byte_from_host


# the plan: from a checkpoint's headers and the functions of a worker

LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LLAMA_70B = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
QWEN3_30B = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
DEEPSEEK = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
FP8_CACHE = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}


@pytest.mark.parametrize(
    ("config", "ranks", "nbytes"),
    [
        (LLAMA_8B, 1, 32 * 2 * 8 * 128 * 2),
        (LLAMA_8B | {"dtype": "float32"}, 1, 32 * 2 * 8 * 128 * 4),
        (LLAMA_8B | FP8_CACHE, 1, 32 * 2 * 8 * 128),
        (LLAMA_8B, 4, 32 * 2 * 2 * 128 * 2),
        (LLAMA_8B, 16, 32 * 2 * 128 * 2),
        (DEEPSEEK, 8, 61 * 576 * 2),
        ({"text_config": QWEN3_30B}, 2, 48 * 2 * 2 * 128 * 2),
        (LLAMA_8B | {"layer_types": ["full_attention", "linear_attention"] * 16}, 1, 16 * 2 * 8 * 128 * 2),
    ],
)
def test_a_token_in_the_kv_cache(config: dict[str, Any], ranks: int, nbytes: int) -> None:
    assert token_nbytes(config, ranks) == nbytes


def test_what_is_processed_takes_memory_while_it_is_staged() -> None:
    specs = {
        "norm": 5,
        "layers.0.attn": 7,
        "layers.0.experts.0.up": 11,
        "layers.0.experts.1.up": 13,
        "layers.1.mlp": 20,
    }
    schema = Schema({name: TensorSpec("uint8", (size,)) for name, size in specs.items()})
    assert scratch_of(schema, {}) == 3 * (11 + 13)
    assert scratch_of(schema, FP8_CACHE) == 3 * (7 + 11 + 13)


def test_each_copy_is_taken_from_the_kv_cache() -> None:
    found = rows(Model(weights=100, scratch=50, token=1), Room(1600), tokens=10)
    assert [(row.kv_cache, row.sequences, row.host) for row in found] == [
        (1350, 135, 300),
        (1250, 125, 200),
        (1150, 115, 100),
        (1050, 105, 0),
    ]
    assert [row.chosen for row in found] == [False, False, False, True]


def test_a_fixed_kv_cache_takes_the_room_of_copies() -> None:
    found = rows(Model(weights=100, scratch=0, token=1), Room(1600, kv_cache=1150), tokens=10)
    assert [row.sequences for row in found] == [115, 115, 115, 110]
    assert [row.chosen for row in found] == [False, False, True, False]


def test_the_command(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 256)
    asked = ["doctor", "--plan", "--model", str(model), "--gpu-gib", "1", "--json"]
    assert "config.json does not say 'num_hidden_layers'" in str(CliRunner().invoke(app, asked).exception)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    answer = json.loads(CliRunner().invoke(app, asked).output)
    assert [row["chosen"] for row in answer] == [False, True, False, False]
    assert answer[0]["kv_cache"] - answer[1]["kv_cache"] == 256 << 20
    shown = CliRunner().invoke(app, asked[:-1]).output
    assert "does not fit" in shown
    assert "auto" in shown
    assert "--model" in str(CliRunner().invoke(app, ["doctor", "--plan"]).exception)


MODELS = {
    "8 B": (16_060_522_496, LLAMA_8B, 0),
    "70 B": (141_107_412_992, LLAMA_70B, 0),
    "30 B of experts": (61_064_245_248, QWEN3_30B, 3 * 128 * 3 * 2048 * 768 * 2),
}
DEVICES = {"80": 81_559 << 20, "141": 143_771 << 20}  # an H100 and an H200, as their driver says
ROW = re.compile(r"^\| (8 B|70 B|30 B of experts), (\d) ranks? \| (80|141) GB \|(.*)\|$", re.MULTILINE)


def test_the_table_of_the_page() -> None:
    """docs/gpu.md has what these functions give."""
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    told = ROW.findall(page)
    assert len(told) == 6
    for name, ranks, gb, cells in told:
        weights, config, scratch = MODELS[name]
        total = DEVICES[gb]
        model = Model(weights // int(ranks), scratch // int(ranks), token_nbytes(config, int(ranks)))
        expected = [cell(row) for row in rows(model, Room.of(total, total), 4096)]
        assert [text.strip() for text in cells.split("|")] == expected, f"{name}, {gb} GB: {' | '.join(expected)}"


def cell(row: Any) -> str:
    if row.kv_cache <= 0:
        return "does not fit"
    text = f"{row.sequences} ({row.kv_cache / 1e9:.1f} GB)"
    return f"**{text}**" if row.chosen else text
