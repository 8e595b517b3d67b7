"""An adapter beside the whole model: bytes published, and how long until a client reads its first token from them.

One server with a model of 0.4 B parameters in bf16, and a process that publishes as a trainer does: by turns all
weights and an adapter (of all linear layers, of the trainer's default rank). A request for the new version waits at the
gateway; the clock runs from the call of `publish` to its first token. The same request is measured again when there is
nothing new.
"""

from __future__ import annotations

import argparse
import json as jsonlib
import statistics
import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from loadtest.measure.machine import machine
from loadtest.models.kinds import bench_checkpoints
from loadtest.workload.children import publishing
from server.cli.admin import AdminClient
from server.up import interrupts
from server.up.config import UpConfig
from server.up.server import Server

MODEL, ADAPTER = "bench", "bench-adapter"
RANK = 16
WAYS = {"model": MODEL, "adapter": ADAPTER}
WARM_UP = 4  # every slot of either kind is faulted in once; a trainer's first versions do that
VLLM_ARGS = ("--max-model-len", "512", "--max-num-seqs", "16", "--enable-lora", "--max-lora-rank", str(RANK))
Figures = dict[str, Any]


def run(json: Path | None, *, rounds: int = 8, small: bool = False) -> Figures:
    """Measure, print the table, and write the figures to `json`; returns them."""
    work = Path("runs") / ("bench-small" if small else "bench")
    (checkpoint,) = bench_checkpoints(work, "dense", small=small, count=1)
    adapter = write_adapter(work / ADAPTER, checkpoint)
    config = UpConfig(
        model=str(checkpoint),
        name=MODEL,
        port=0,
        throwaway=True,
        state_dir=work / "lora-state",
        kv_cache_gib=0.5,
        vllm_args=VLLM_ARGS,
    )
    with Server(config) as server:
        found = measure(server, checkpoint, adapter, rounds)
    figures: Figures = {way: summary(rows) for way, rows in found.items()}
    figures["model_over_adapter"] = ratios(figures["model"], figures["adapter"])
    figures |= {"rounds": rounds, "rank": RANK, "machine": machine()}
    show(figures)
    if json is not None:
        json.write_text(jsonlib.dumps(figures, indent=1) + "\n")
    return figures


def write_adapter(path: Path, base: Path, rank: int = RANK) -> Path:
    """A random adapter with the tensors that the trainer publishes, in bf16, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    from trainer.config import LoraConfig
    from trainer.megatron.hf_config import load_shape
    from trainer.megatron.lora import adapter_config, adapter_schema

    shape, lora = load_shape(base), LoraConfig(name=path.name, rank=rank)
    generator = torch.Generator().manual_seed(0)
    rows = adapter_schema(shape, lora, "bfloat16")
    tensors = {name: (torch.randn(size, generator=generator) / 100).bfloat16() for name, _, size in rows}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(jsonlib.dumps(adapter_config(shape, lora, str(base))))
    return path


def measure(server: Server, checkpoint: Path, adapter: Path, rounds: int) -> dict[str, list[Figures]]:
    """The rows of either way, by turns."""
    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    client = OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=120)
    admin = AdminClient(server.state_dir)
    with publishing(server.store, MODEL, [checkpoint, adapter]) as publish:
        for turn in range(WARM_UP + rounds):
            for number, (way, name) in enumerate(WAYS.items()):
                began = time.perf_counter()
                published = publish(number, now=True)
                first_token(client, name, published["version"])
                total_ms = (time.perf_counter() - began) * 1e3
                idle = time.perf_counter()
                first_token(client, name, published["version"])
                idle_ms = (time.perf_counter() - idle) * 1e3
                (record,) = admin.call("GET", "/admin/instances")["instances"]
                row = {"bytes": published["nbytes"], "publish_ms": published["publish_ms"]}
                row |= {"stage_ms": record["stage_ms"], "commit_ms": record["commit_ms"]}
                if turn >= WARM_UP:
                    found[way].append(row | {"first_token_ms": total_ms, "without_publishing_ms": idle_ms})
    return found


def first_token(client: OpenAI, model: str, version: int) -> None:
    """Wait for the first token of an answer by this version or a later one."""
    with client.completions.create(
        model=model,
        prompt=list(range(10, 26)),
        max_tokens=4,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-hotswap-min-version": str(version), "x-hotswap-wait-s": "60"},
    ) as chunks:
        next(chunk for chunk in chunks if chunk.choices)


def summary(rows: list[Figures]) -> Figures:
    """Medians of the rounds, and the extremes of what counts."""
    middle = {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
    told = sorted(row["first_token_ms"] for row in rows)
    return middle | {"bytes": rows[0]["bytes"], "first_token_ms_range": [round(told[0], 3), round(told[-1], 3)]}


def ratios(model: Figures, adapter: Figures) -> Figures:
    """How many times as much the whole model takes."""
    return {key: round(model[key] / adapter[key], 2) for key in ("bytes", "publish_ms", "stage_ms", "first_token_ms")}


def show(figures: Figures) -> None:
    """The table on standard output."""
    keys = ("publish_ms", "stage_ms", "commit_ms", "first_token_ms", "without_publishing_ms")
    table = Table("published", "MB", *keys, title="from publish() to a client's first token, medians")
    for way in WAYS:
        row = figures[way]
        table.add_row(way, f"{row['bytes'] / 1e6:.1f}", *(f"{row[key]:.1f}" for key in keys))
    console = Console(width=120)
    console.print(table)
    console.print(f"the model over the adapter: {figures['model_over_adapter']}")


if __name__ == "__main__":
    interrupts.install()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    run(options.json, rounds=options.rounds, small=options.small)
