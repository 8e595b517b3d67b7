"""The memory that copies of a model on a GPU take from its KV cache: from a checkpoint's headers and a worker's own
functions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli.app import app
from server.doctor.plan import Model, rows, scratch_of, token_nbytes
from tests.server.doctor.worlds import checkpoint
from weightsync.format.manifest import Schema, TensorSpec
from weightsync.vllm_engine.device.room import Room

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
