"""Unpack what lies beside this file, and run the GPU day with it: `python3 PACK/unpack.py [--site DIR] [WHAT...]`.

In the root of a checkout of Hotswap. It needs Python alone. Each part is checked against its digest before anything is
written, and DIR is there as a whole or not at all; if it is there from this pack, it is used as it is. WHAT and what
follows go to `python -m loadtest.gpu_day`, whose seconds begin here.

    PackError
    ├── PartMissing        transfer it, too
    ├── PartDamaged        transfer it again
    ├── OtherPython        the packages are for another Python
    └── OtherArchitecture  they are for another processor, or the machine code in them for another GPU
"""

from __future__ import annotations

import compileall
import hashlib
import io
import json
import lzma
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

MANIFEST = "pack.json"
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "4",
    "VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
INFOS = "model-infos"  # in the packages: vLLM's cache as the pack has it
CACHES = {"TRITON_CACHE_DIR": "triton", "NUMBA_CACHE_DIR": "numba", "VLLM_CACHE_ROOT": "vllm"}


class PackError(Exception):
    """A pack cannot be used; the message says why, and what to do."""


class PartMissing(PackError):
    pass


class PartDamaged(PackError):
    pass


class OtherPython(PackError):
    pass


class OtherArchitecture(PackError):
    pass


def checked(pack: Path) -> dict[str, Any]:
    """The manifest of a pack that fits this machine, all of whose parts are there. Raises PackError."""
    if not (pack / MANIFEST).is_file():
        raise PartMissing(f"no {MANIFEST} in {pack}: transfer it with the parts")
    manifest: dict[str, Any] = json.loads((pack / MANIFEST).read_text())
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if manifest["python"] != python:
        wanted = manifest["python"]
        raise OtherPython(f"the packages are for Python {wanted}, and this is {python}: use python{wanted}")
    if manifest["machine"] != (machine := platform.machine()):
        raise OtherArchitecture(
            f"the packages are for {manifest['machine']}, and this is {machine}: use such a machine"
        )
    for capability in _capabilities():
        if capability != manifest["arch"]:
            raise OtherArchitecture(
                f"the code is for sm_{manifest['arch']}, and this GPU is sm_{capability}: "
                f"make the pack with --arch {capability}"
            )
    for part in manifest["parts"]:
        path = pack / part["name"]
        if not path.is_file():
            raise PartMissing(f"{path} is missing: transfer it, too")
        if path.stat().st_size != part["nbytes"] or hashlib.sha256(path.read_bytes()).hexdigest() != part["sha256"]:
            raise PartDamaged(f"{path} is not what was packed: transfer it again")
    return manifest


def _capabilities() -> list[int]:
    """90 for sm_90, of each GPU; none where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(digits) for line in answer.stdout.split() if (digits := line.replace(".", "")).isdigit()]


def unpack(pack: Path, site: Path) -> bool:
    """Returns whether it was necessary. Raises PackError."""
    manifest = checked(pack)
    if (site / MANIFEST).is_file() and json.loads((site / MANIFEST).read_text()) == manifest:
        return False
    site.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=site.parent) as directory:
        found = Path(directory) / "site"
        found.mkdir()
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(_extract, found), [pack / part["name"] for part in manifest["parts"]]))
        compileall.compile_dir(found, quiet=2, workers=os.cpu_count() or 1, stripdir=str(found), prependdir=str(site))
        shutil.copy(pack / MANIFEST, found)
        shutil.rmtree(site, ignore_errors=True)
        found.rename(site)
    return True


def _extract(site: Path, part: Path) -> None:
    """Not by extractall: two processes that make one folder at once fail there."""
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(part.read_bytes()))) as archive:
        for member in archive:
            path, source = site / member.name, archive.extractfile(member)
            path.parent.mkdir(parents=True, exist_ok=True)
            assert source is not None, "files alone are packed"
            with path.open("wb") as file:
                shutil.copyfileobj(source, file)


def main(arguments: Sequence[str]) -> int:
    began, site, what = time.monotonic(), Path(tempfile.gettempdir()) / "gpu-site", list(arguments)
    if what[:1] == ["--site"]:
        site, what = Path(what[1]).absolute(), what[2:]
    try:
        did = unpack(Path(__file__).resolve().parent, site)
    except PackError as error:
        print(f"unpack: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{site} is there after {time.monotonic() - began:.1f} s{'' if did else ', as it was'}", flush=True)
    if what:
        _run(site, began, what)
    return 0


def _run(site: Path, began: float, what: Sequence[str]) -> NoReturn:
    """In this process's place."""
    temporary = Path(tempfile.gettempdir())
    caches = {name: str(temporary / f"gpu-{folder}") for name, folder in CACHES.items()}
    if (site / INFOS).is_dir():
        shutil.copytree(site / INFOS, caches["VLLM_CACHE_ROOT"], dirs_exist_ok=True)
    paths = os.pathsep.join([str(site), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **ENVIRONMENT, **caches, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "loadtest.gpu_day", "--began", str(began), *what]
    os.execve(sys.executable, command, environment)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
