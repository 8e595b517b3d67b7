"""Pack the imports of vLLM and Hotswap for a GPU machine without a network: `python -m loadtest.gpu_day.pack DIR`.

The machine has one GPU, Python 3.12, torch with CUDA, and the tracked files of this checkout. It gets wheels,
unpacked and thinned out, as archives that as many processes unpack, and `unpack.py`, which checks them. Only pip is
asked.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loadtest.gpu_day.pack import fatbin
from loadtest.gpu_day.pack.unpack import INFOS, MANIFEST, PackError

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
PINS = ROOT / "requirements" / "cuda.txt"
PYTHON, MACHINE = "3.12", "x86_64"
VLLM = "0.32.0"
GLIBC = range(39, 16, -1)  # the manylinux tags that are looked for; pip takes each by its number alone
DROPPED = (
    "vllm/vllm-rs",  # a front end in Rust
    "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*", "vllm/third_party/tml_fa4/*",
    "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/_qutlass_C*", "vllm/_deepselect_C*", "vllm/_flashkda_C*",
    "*/tests/*", "*/test/*", "*.pyi", "*.pyc", "*/py.typed", "*.c", "*.h", "*.hpp", "*.cpp", "*.pyx", "*.a",
)  # fmt: skip
"""Neither imported at start nor loaded on sm_90; DeepGEMM asks for a newer torch."""
CLASSES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")  # of the phases' models
WRITTEN_AT = 1_700_000_000  # of all files in the archives: the same contents have the same digest


def requirements(vllm: str) -> list[str]:
    """The pinned packages of the pack. Raises PackError for a package whose release is in no list, and for what Hotswap
    depends on and neither the pack nor the machine has."""
    lines = (line.strip() for line in PINS.read_text().splitlines())
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#")) | {"vllm": vllm}
    listed = [line.partition("#")[0].strip() for line in (HERE / "packages.txt").read_text().splitlines()]
    names = [*(name for name in listed if name and not name.startswith("-")), "vllm"]
    if unknown := [name for name in names if name not in pins]:
        raise PackError(f"{', '.join(unknown)}: not in {PINS.relative_to(ROOT)}; take packages of that list")
    if missing := sorted(dependencies() - {name.removeprefix("- ") for name in listed}):
        raise PackError(
            f"{', '.join(missing)}: Hotswap needs it; add it to packages.txt, with `- ` if the machine has it"
        )
    return [f"{name}=={pins[name]}" for name in names]


def dependencies() -> set[str]:
    """The names of the packages that a server needs, whatever it runs on, but for Hotswap's own."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {name for line in found if not (name := re.split(r"[^\w.-]", line)[0]).startswith("hotswap-")}


def wheels_of(wanted: Iterable[str], directory: Path) -> list[Path]:
    """A wheel for each requirement; those that are in `directory` are not fetched again. Raises PackError."""
    directory.mkdir(parents=True, exist_ok=True)
    if missing := [requirement for requirement in wanted if not _wheel(requirement, directory)]:
        _download(missing, directory)
    return [path for requirement in wanted if (path := _wheel(requirement, directory)) is not None]


def _wheel(requirement: str, directory: Path) -> Path | None:
    name, _, release = requirement.partition("==")
    begin = f"{name.lower().replace('-', '_').replace('.', '_')}-{release}-"
    return next((p for p in sorted(directory.glob("*.whl")) if p.name.lower().startswith(begin)), None)


def _download(wanted: Sequence[str], directory: Path) -> None:
    """Wheels for PYTHON on Linux on x86-64. Raises PackError with pip's words."""
    tags = [f"manylinux_2_{n}_{MACHINE}" for n in GLIBC]
    tags += [f"manylinux2014_{MACHINE}", f"manylinux2010_{MACHINE}", f"manylinux1_{MACHINE}", f"linux_{MACHINE}", "any"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON, "--dest", str(directory)]
    command += ["--abi", f"cp{PYTHON.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
    command += [part for tag in tags for part in ("--platform", tag)]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"pip has no wheels for Python {PYTHON} of all of {' '.join(wanted)}:\n{done.stderr}")


def install(wheel: Path, site: Path) -> None:
    """Put the files of `wheel` into `site` as pip would, less DROPPED; commands and headers are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename
            first, _, rest = name.partition("/")
            if first.endswith(".data"):
                kind, _, name = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            if not member.is_dir() and not any(fnmatch.fnmatch(name, pattern) for pattern in DROPPED):
                path = site / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))


def thin(site: Path, arch: int, *, ptx: bool, heads: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Take symbols that only debuggers read, and machine code of other GPUs, out of each library. Raises PackError."""
    if shutil.which("strip") is None:
        raise PackError("strip is not installed: install binutils")
    figures = {}
    for path in sorted(site.rglob("*.so*")):
        with path.open("rb") as file:
            if file.read(len(fatbin.ELF_MAGIC)) != fatbin.ELF_MAGIC:
                continue
        before = path.stat().st_size
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=False, capture_output=True)
        also = fatbin.flash3(heads) if "_vllm_fa3_C" in path.name else fatbin.everything
        data, found = fatbin.pruned(path.read_bytes(), arch, ptx=ptx, also=also)
        if found:
            path.write_bytes(data)
            figures[str(path.relative_to(site))] = {"before": before, **found}
    return figures


def add_entry_points(site: Path) -> None:
    """Write the metadata that makes this checkout an installed package: vLLM finds plug-ins by it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir()
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    text = "".join(f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) + "\n" for g, found in groups.items())
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (folder / "entry_points.txt").write_text(text)


def add_model_infos(site: Path) -> None:
    """Add what vLLM finds out about a class of models: on a new machine that takes a process and half a minute.

    The vLLM of this environment writes it, if there is one. The packed vLLM takes it where its source is the same.
    """
    code = "from vllm.model_executor.models.registry import ModelRegistry as known\n"
    code += f"for name in {CLASSES!r}: known.models[name].inspect_model_cls()"
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(site / INFOS), "VLLM_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"pack: vLLM's knowledge of models is left out: {done.stderr.strip()[-200:]}", file=sys.stderr)


def write(site: Path, target: Path, arch: int, count: int, **more: Any) -> dict[str, Any]:
    """Make `target` anew: the files of `site` in `count` archives of about one size, and what unpacks them. Returns the
    manifest; `more` goes into it."""
    bins: list[list[Path]] = [[] for _ in range(count)]
    loads = [0] * count
    for path in sorted((p for p in site.rglob("*") if p.is_file()), key=lambda p: (-p.stat().st_size, p)):
        least = loads.index(min(loads))
        bins[least].append(path)
        loads[least] += path.stat().st_size + 4096
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)

    def part(index: int) -> dict[str, Any]:
        raw, path = io.BytesIO(), target / f"pack.{index:02d}.tar.xz"
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for source in sorted(bins[index]):
                member = tarfile.TarInfo(str(source.relative_to(site)))
                member.size, member.mtime = source.stat().st_size, WRITTEN_AT
                with source.open("rb") as file:
                    archive.addfile(member, file)
        data = lzma.compress(raw.getbuffer(), preset=6 | lzma.PRESET_EXTREME)
        path.write_bytes(data)
        return {"name": path.name, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(part, range(count)))
    manifest = {"python": PYTHON, "machine": MACHINE, "arch": arch, **more, "parts": parts}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(HERE / "unpack.py", target)
    return manifest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_day.pack", description=__doc__)
    parser.add_argument("directory", type=Path, help="made anew")
    parser.add_argument("--vllm", default=VLLM, metavar="RELEASE")
    parser.add_argument("--arch", type=int, default=90, help="of the GPU: 90 is sm_90, Hopper")
    parser.add_argument("--wheels", type=Path, default=Path("build") / "wheels", help="kept between runs")
    parser.add_argument("--ptx", action="store_true", help="also what the driver compiles: Marlin (GPTQ, AWQ)")
    parser.add_argument("--heads", nargs="*", default=["64", "128"], help="sizes of heads for FlashAttention 3")
    parser.add_argument("--parts", type=int, default=12)
    options = parser.parse_args(argv)
    try:
        wheels = wheels_of(requirements(options.vllm), options.wheels)
        with tempfile.TemporaryDirectory() as directory:
            site = Path(directory)
            for wheel in wheels:
                install(wheel, site)
            libraries = thin(site, options.arch, ptx=options.ptx, heads=tuple(options.heads))
            add_entry_points(site)
            add_model_infos(site)
            about = {"packages": [wheel.name for wheel in wheels], "libraries": libraries}
            manifest = write(site, options.directory, options.arch, options.parts, **about)
    except PackError as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    total = sum(part["nbytes"] for part in manifest["parts"])
    print(f"{len(wheels)} wheels for Python {PYTHON}, {total / (1 << 20):.1f} MiB in {options.parts} parts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
