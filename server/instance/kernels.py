"""The kernels that an engine on a GPU compiles at their first use: what that takes, and where they are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

SAMPLER_ENV = "VLLM_USE_FLASHINFER_SAMPLER"


def c_compiler(env: Mapping[str, str]) -> str | None:
    """The one with which Triton makes what launches its kernels."""
    names = [env["CC"]] if "CC" in env else ["clang", "gcc"]
    return next((found for name in names if (found := shutil.which(name, path=env.get("PATH")))), None)


def flashinfer_samples(env: Mapping[str, str]) -> bool:
    """Whether FlashInfer's sampler is there compiled, or can be compiled and linked as FlashInfer would do it.

    vLLM does not ask, and an engine ends at its first request with top_p or top_k where that fails.
    """
    if find_spec("flashinfer") is None:
        return False
    if find_spec("flashinfer_jit_cache") is not None:
        return True
    path = env.get("PATH")
    found = shutil.which("nvcc", path=path)
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH") or (str(Path(found).parents[1]) if found else "/usr/local/cuda")
    compiler, linker = env.get("FLASHINFER_NVCC", f"{home}/bin/nvcc"), env.get("CXX", "c++")
    if not all(shutil.which(program, path=path) for program in (compiler, linker, "ninja")):
        return False
    if not Path(home, "include", "curand.h").exists():
        return False
    link = [linker, "-shared", "-o", os.devnull, f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    return subprocess.run(link, capture_output=True, env=dict(env)).returncode == 0


def caches(env: Mapping[str, str]) -> dict[str, Path]:
    """Where what was compiled is kept, by what compiles it. vLLM's directory has torch.compile's and DeepGEMM's."""
    home = Path(env.get("HOME") or "~").expanduser()
    vllm = env.get("VLLM_CACHE_ROOT") or Path(env.get("XDG_CACHE_HOME") or home / ".cache", "vllm")
    return {
        "vLLM": Path(vllm),
        "Triton": Path(env.get("TRITON_CACHE_DIR") or Path(env.get("TRITON_HOME") or home, ".triton", "cache")),
        "FlashInfer": Path(env.get("FLASHINFER_WORKSPACE_BASE") or home, ".cache", "flashinfer"),
        "TileLang": Path(env.get("TILELANG_CACHE_DIR") or home / ".tilelang" / "cache"),
    }
