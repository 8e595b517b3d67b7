"""Stock vLLM with the plug-in installed works as without it, in programs that know nothing of Hotswap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.checkpoints import make_checkpoint

PROGRAM = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model = LLM(sys.argv[1], enforce_eager=True, kv_cache_memory_bytes=1 << 26, max_model_len=256, max_num_seqs=4)
    (answer,) = model.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=4, ignore_eos=True))
    print("tokens:", len(answer.outputs[0].token_ids))
"""


@pytest.mark.broad
@pytest.mark.engine
def test_offline_generation(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy")
    made = subprocess.run([sys.executable, "-c", PROGRAM, str(checkpoint)], capture_output=True, text=True)
    assert "tokens: 4" in made.stdout, made.stderr[-2000:]
