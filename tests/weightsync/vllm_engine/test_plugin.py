"""Stock vLLM with the plug-in installed works as without it, in programs that know nothing of Hotswap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.models.checkpoints import make_checkpoint

# vLLM 0.32 does not ask Linux for the tile registers of AMX itself, and dies where nothing else has (the plug-in does).
STOCK = "import torch; torch.cpu._init_amx()"
# It ends without Python's own end: a thread of vLLM's client may hold a tensor then, and PyTorch aborts the process.
PROGRAM = """
import os
import sys
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

if __name__ == "__main__":
    small = dict(enforce_eager=True, kv_cache_memory_bytes=1 << 26, max_model_len=256, max_num_seqs=4)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    model = LLM(sys.argv[1], **small)
    print("plug-in:", "hotswap" in WeightTransferEngineFactory._registry)
    (answer,) = model.generate([{"prompt_token_ids": [5, 6]}], params)
    print("tokens:", list(answer.outputs[0].token_ids))
    (answer,) = model.chat([{"role": "user", "content": "hi"}], params)
    print("chat:", list(answer.outputs[0].token_ids))
    del model
    model = LLM(sys.argv[1], runner="pooling", convert="embed", **small)
    (answer,) = model.embed([{"prompt_token_ids": [5, 6, 7]}])
    print("embedding:", [round(value, 3) for value in answer.outputs.embedding], flush=True)
    del model
    os._exit(0)
"""


def answers(checkpoint: Path, plugins: str | None) -> list[str]:
    """The program's output; `plugins`: those that vLLM loads, None for all."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    program = PROGRAM
    if plugins is not None:  # in one process, which starts sooner
        environment |= {"VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        program = STOCK + PROGRAM
    made = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint)], env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return [
        line for line in made.stdout.splitlines() if line.startswith(("plug-in:", "tokens:", "chat:", "embedding:"))
    ]


@pytest.mark.broad
@pytest.mark.engine
@pytest.mark.timeout(600)  # four engines, one after the other
def test_offline_generation(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy", scale=3.0)
    with_ours, stock = answers(checkpoint, None), answers(checkpoint, "")
    assert (with_ours[0], stock[0]) == ("plug-in: True", "plug-in: False")
    assert with_ours[1:] == stock[1:]
    assert len(with_ours) == 4
