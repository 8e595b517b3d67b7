"""What a machine without a network needs to run the phases: `python -m loadtest.gpu_day.pack DIR`.

It has Python and torch with CUDA; it gets the tracked files of this checkout, wheels of the packages that it lacks, and
a script that runs the phases. All of that is one archive in parts of `--part-mib`, each with its digest; `unpack.py`,
which comes beside them, checks and joins them.

    python -m loadtest.gpu_day.pack build/pack --without numpy numba llvmlite
    python -m loadtest.gpu_day.pack build/pack --vllm 0.32.0

`--vllm` takes vLLM and all that requirements/cuda.txt names, but for what is there (`--there`): many parts.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtest.gpu_day.unpack import CHUNK, MANIFEST, PackError, digest_of

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "cuda.txt"
PACKAGES = ("orjson", "xxhash", "numpy", "numba", "llvmlite", "cuda-bindings", "cuda-pathfinder")
"""What the phases without vLLM import, besides torch."""
THERE = (
    "torch", "torchvision", "torchaudio", "triton", "cuda-toolkit", "nvidia-cublas", "nvidia-cuda-cupti",
    "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-cufft", "nvidia-cufile", "nvidia-curand",
    "nvidia-cusolver", "nvidia-cusparse", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13", "nvidia-nvjitlink",
    "nvidia-nvshmem-cu13", "nvidia-nvtx",
)  # fmt: skip
"""torch, and the packages that its build for CUDA brings."""
PYTHON = "3.12"
PART_MIB = 48
GLIBC = range(39, 16, -1)  # the manylinux tags that are looked for; pip takes each by its number alone
RUN = """#!/bin/sh
# Runs phases of the GPU day with what was unpacked here: run.sh PHASE [--json FILE]
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/site:$here/repo${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
cd "$here/repo" && exec "${PYTHON:-python3}" -m loadtest.gpu_day "$@"
"""


def pins() -> dict[str, str]:
    """The release of each package that was tested with CUDA."""
    lines = (line.strip() for line in PINS.read_text().splitlines())
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def chosen(vllm: str | None, without: Iterable[str], there: Iterable[str], more: Iterable[str]) -> list[str]:
    """Requirements, pinned. Raises PackError for a package that no list has."""
    known = pins()
    left_out = [*without, *there]
    usual = [
        name
        for name in dict.fromkeys([*PACKAGES, *(known if vllm is not None else ())])
        if not any(fnmatch.fnmatch(name, pattern) for pattern in left_out)
    ]
    found: dict[str, str] = {}
    for name in [*usual, *more]:
        bare, _, release = name.partition("==")
        if not release and bare not in known:
            raise PackError(f"{bare} is not in {PINS.relative_to(ROOT)}: say which release, {bare}==RELEASE")
        found[bare] = release or known[bare]
    if vllm is not None:
        found["vllm"] = vllm
    return [f"{name}=={release}" for name, release in found.items()]


def download(requirements: Sequence[str], target: Path, python: str) -> None:
    """Wheels for that Python on Linux on x86-64. Raises PackError with pip's words."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + ["manylinux2014_x86_64", "manylinux2010_x86_64",
                                                              "manylinux1_x86_64", "linux_x86_64"]  # fmt: skip
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(target)]
    command += [part for platform in platforms for part in ("--platform", platform)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"pip has no wheels for Python {python} of all of {' '.join(requirements)}:\n{done.stderr}")


def pack(
    target: Path, requirements: Sequence[str], *, python: str = PYTHON, part_mib: float = PART_MIB
) -> dict[str, Any]:
    """Make `target` anew; returns the manifest. Raises PackError."""
    if part_mib <= 0:
        raise PackError(f"--part-mib {part_mib:g}: must be more than 0")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=target) as directory:
        wheels, whole = Path(directory) / "wheels", Path(directory) / "pack.tar"
        wheels.mkdir()
        if requirements:
            download(requirements, wheels, python)
        with tarfile.open(whole, "w") as archive:
            for name in _tracked():
                archive.add(ROOT / name, f"repo/{name}")
            for name, text in _installed_as().items():
                _add(archive, f"repo/{name}", text)
            _add(archive, "run.sh", RUN, mode=0o755)
            for wheel in sorted(wheels.iterdir()):
                archive.add(wheel, f"wheels/{wheel.name}")
        parts = [
            {"name": part.name, "nbytes": part.stat().st_size, "sha256": digest_of(part)}
            for part in _split(whole, target, int(part_mib * (1 << 20)))
        ]
        manifest = {
            "python": python,
            "revision": _git("rev-parse", "--short", "HEAD").strip(),
            "packages": [wheel.name for wheel in sorted(wheels.iterdir())],
            "parts": parts,
        }
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(Path(__file__).with_name("unpack.py"), target)
    return manifest


def _git(*arguments: str) -> str:
    """Raises PackError."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"{ROOT} is not a git checkout, whose tracked files are packed: {done.stderr.strip()}")
    return done.stdout


def _tracked() -> list[str]:
    return [name for name in _git("ls-files", "-z").split("\0") if name and (ROOT / name).is_file()]


def _installed_as() -> dict[str, str]:
    """What makes the sources an installed package: vLLM finds plug-ins by it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = f"{project['name']}-{project['version']}.dist-info"
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    points = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in found.items()) + "\n"
        for group, found in groups.items()
    )
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    return {f"{name}/METADATA": metadata, f"{name}/entry_points.txt": points}


def _add(archive: tarfile.TarFile, name: str, text: str, mode: int = 0o644) -> None:
    data = text.encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    archive.addfile(member, io.BytesIO(data))


def _split(whole: Path, target: Path, nbytes: int) -> Iterator[Path]:
    with whole.open("rb") as source:
        number, left = 0, whole.stat().st_size
        while left:
            part = target / f"pack.{number:03d}"
            size = min(nbytes, left)
            left -= size
            number += 1
            with part.open("wb") as file:
                while size:
                    piece = source.read(min(CHUNK, size))
                    file.write(piece)
                    size -= len(piece)
            yield part


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_day.pack", description=__doc__)
    parser.add_argument("directory", type=Path, help="made anew")
    parser.add_argument("--vllm", metavar="VERSION", help="vLLM as well, with all that it needs")
    parser.add_argument(
        "--with", dest="more", nargs="*", default=(), metavar="NAME[==RELEASE]", help="further packages"
    )
    parser.add_argument("--without", nargs="*", default=(), metavar="NAME", help="packages that the machine has")
    parser.add_argument("--there", nargs="*", default=THERE, metavar="PATTERN", help="the same, instead of torch's")
    parser.add_argument("--python", default=PYTHON, help="of the machine")
    parser.add_argument("--part-mib", type=float, default=PART_MIB, help="the most that a part may have")
    options = parser.parse_args(argv)
    try:
        requirements = chosen(options.vllm, options.without, options.there, options.more)
        manifest = pack(options.directory, requirements, python=options.python, part_mib=options.part_mib)
    except PackError as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    for part in manifest["parts"]:
        print(f"{part['nbytes'] / (1 << 20):8.1f} MiB  {options.directory / part['name']}")
    print(f"{len(manifest['packages'])} wheels for Python {options.python}; on the machine: "
          f"python3 unpack.py DIR... TARGET && TARGET/run.sh all --json FILE")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
