"""The pack for a machine without a network: what goes into it, how it is thinned out, and what is not unpacked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.gpu_day.pack import __main__ as pack
from loadtest.gpu_day.pack import fatbin, unpack

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
FILES = {"vllm/__init__.py": b"", "a/one.py": b"ONE = 1\n", "a/two.so": os.urandom(2000), "b/three.txt": b"3",
         f"{unpack.INFOS}/modelinfos/x.json": b"{}"}  # fmt: skip


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of FILES, for this Python, in three parts."""
    monkeypatch.setattr(pack, "PYTHON", PYTHON)
    site, target = tmp_path / "made", tmp_path / "pack"
    for name, contents in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(contents)
    pack.write(site, target, 90, 3, packages=[])
    return target


def run_unpack(packed: Path, *arguments: str | Path, gpu: str = "") -> subprocess.CompletedProcess[str]:
    """`gpu`: the capability that an nvidia-smi says; "": there is none."""
    programs = packed.parent / "bin"
    programs.mkdir(exist_ok=True)
    if gpu:
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho {gpu}\n")
        (programs / "nvidia-smi").chmod(0o755)
    temporary = packed.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(packed / "unpack.py"), *map(str, arguments)]
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "TMPDIR": str(temporary)}
    return subprocess.run(command, capture_output=True, text=True, cwd=packed.parent, env=environment)


def test_a_pack_is_unpacked_once_and_whole(packed: Path, tmp_path: Path) -> None:
    site = tmp_path / "somewhere" / "site"
    done = run_unpack(packed, "--site", site, gpu="9.0")
    assert done.returncode == 0, done.stderr
    assert {name: (site / name).read_bytes() for name in FILES} == FILES
    assert list((site / "a" / "__pycache__").glob("one.*.pyc")), "modules are compiled"
    (site / "a" / "one.py").write_text("ONE = 2\n")
    assert "as it was" in run_unpack(packed, "--site", site).stdout
    assert (site / "a" / "one.py").read_text() == "ONE = 2\n"
    manifest = json.loads((packed / unpack.MANIFEST).read_text())
    (packed / unpack.MANIFEST).write_text(json.dumps({**manifest, "packages": ["another"]}))
    assert "as it was" not in run_unpack(packed, "--site", site).stdout
    assert (site / "a" / "one.py").read_bytes() == FILES["a/one.py"]
    assert [path.name for path in site.parent.iterdir()] == ["site"], "nothing is left of the unpacking"


def test_the_day_runs_with_what_was_unpacked(packed: Path, tmp_path: Path) -> None:
    """The package of the checkout in which it is called; the seconds count from the beginning of the unpacking. vLLM
    finds in its cache what the pack knows of models."""
    program = tmp_path / "loadtest" / "gpu_day" / "__main__.py"
    program.parent.mkdir(parents=True)
    program.write_text(
        "import json, os, sys, a.one; cache = os.environ['VLLM_CACHE_ROOT']; "
        "print(json.dumps([sys.argv[1:], os.environ['VLLM_USE_DEEP_GEMM'], open(f'{cache}/modelinfos/x.json').read()]))"
    )
    done = run_unpack(packed, "--site", tmp_path / "site", "call-1", "--json", "x.json")
    assert done.returncode == 0, done.stderr
    (option, began, *what), switch, known = json.loads(done.stdout.splitlines()[-1])
    assert (option, what, switch, known) == ("--began", ["call-1", "--json", "x.json"], "0", "{}")
    assert float(began) > 0


@pytest.mark.parametrize("there", [True, False])
def test_the_pack_knows_of_models_what_the_vllm_of_this_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    for package in (models, *models.parents[:2]):
        (package / "__init__.py").touch()
    if there:
        (models / "registry.py").write_text(
            "import os, pathlib\n"
            "class Known(dict):\n"
            "    def __missing__(self, name):\n"
            "        self.name = name\n"
            "        return self\n"
            "    def inspect_model_cls(self):\n"
            "        cache = pathlib.Path(os.environ['VLLM_CACHE_ROOT']) / 'modelinfos'\n"
            "        cache.mkdir(parents=True, exist_ok=True)\n"
            "        (cache / self.name).write_text('{}')\n"
            "class ModelRegistry:\n"
            "    models = Known()\n"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pack.add_model_infos(tmp_path / "site")
    found = {path.name for path in (tmp_path / "site").glob(f"{unpack.INFOS}/modelinfos/*")}
    assert found == (set(pack.CLASSES) if there else set())
    assert ("vLLM's knowledge of models is left out" in capsys.readouterr().err) is not there


def damage(packed: Path) -> None:
    part = packed / "pack.01.tar.xz"
    contents = bytearray(part.read_bytes())
    contents[20] ^= 1
    part.write_bytes(contents)


def remove(name: str) -> Callable[[Path], None]:
    return lambda packed: (packed / name).unlink()


def say(**manifest: Any) -> Callable[[Path], None]:
    def change(packed: Path) -> None:
        path = packed / unpack.MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | manifest))

    return change


REFUSED = [
    (damage, "", "PartDamaged: {pack}/pack.01.tar.xz is not what was packed: transfer it again"),
    (remove("pack.02.tar.xz"), "", "PartMissing: {pack}/pack.02.tar.xz is missing: transfer it, too"),
    (remove("pack.json"), "", "PartMissing: no pack.json in {pack}: transfer it with the parts"),
    (say(python="2.7"), "", f"OtherPython: the packages are for Python 2.7, and this is {PYTHON}: use python2.7"),
    (say(machine="sparc"), "", "OtherArchitecture: the packages are for sparc, and this is x86_64: use such a machine"),
    (say(), "10.0", "OtherArchitecture: the code is for sm_90, and this GPU is sm_100: make the pack with --arch 100"),
]


@pytest.mark.parametrize(("change", "gpu", "refusal"), REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    packed: Path, tmp_path: Path, change: Callable[[Path], None], gpu: str, refusal: str
) -> None:
    change(packed)
    done = run_unpack(packed, "--site", tmp_path / "site", "call-1", gpu=gpu)
    assert (done.returncode, done.stderr) == (1, f"unpack: {refusal.format(pack=packed)}\n")
    assert not (tmp_path / "site").exists()


# making ---------------------------------------------------------------------------------------------------------------


def test_what_is_packed_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = pack.requirements("9.9")
    assert "vllm==9.9" in wanted
    assert {"fastapi", "aetcd", "xgrammar"} <= {name.partition("==")[0] for name in wanted}
    assert all("==" in name for name in wanted)
    assert not [name for name in wanted if name.startswith(("torch==", "triton==", "nvidia-"))]
    (tmp_path / "packages.txt").write_text("# of vLLM\nmade-up\n")
    monkeypatch.setattr(pack, "HERE", tmp_path)
    with pytest.raises(unpack.PackError, match=r"made-up: not in requirements/cuda.txt"):
        pack.requirements("9.9")


def test_what_hotswap_needs_is_in_the_pack_or_on_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = (pack.HERE / "packages.txt").read_text().replace("google-re2\n", "").replace("- numpy\n", "")
    (tmp_path / "packages.txt").write_text(packages)
    monkeypatch.setattr(pack, "HERE", tmp_path)
    with pytest.raises(unpack.PackError, match=r"google-re2, numpy: Hotswap needs it; add it to packages.txt"):
        pack.requirements("9.9")


def test_wheels_that_are_there_are_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("Partial_Json-1.0.post7-py3-none-any.whl", "other-2.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    asked = list[list[str]]()

    def fetch(wanted: list[str], directory: Path) -> None:
        asked.append(wanted)
        (directory / "other-2.1-py3-none-any.whl").touch()

    monkeypatch.setattr(pack, "_download", fetch)
    found = pack.wheels_of(["partial-json==1.0.post7", "other==2.1"], tmp_path)
    assert asked == [["other==2.1"]]
    assert [path.name[:9] for path in found] == ["Partial_J", "other-2.1"]


def test_a_wheel_goes_where_pip_would_put_it(tmp_path: Path) -> None:
    wheel, site = tmp_path / "x.whl", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("x/__init__.py", "x/tests/y.py", "x/y.pyi", "x-1.data/purelib/y.py", "x-1.data/scripts/z"):
            archive.writestr(name, "")
    pack.install(wheel, site)
    assert {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()} == {"x/__init__.py", "y.py"}


def test_the_checkout_is_an_installed_package(tmp_path: Path) -> None:
    pack.add_entry_points(tmp_path)
    found = (
        "from importlib import metadata; print([p.value for p in metadata.entry_points(group='vllm.general_plugins')])"
    )
    command = [sys.executable, "-S", "-c", found]
    listed = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert "weightsync.vllm_plugin:register" in listed.stdout, "vLLM would not find the plug-in"


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQIIHHI", kind, 0, 64, len(payload), 0, 0, 0, 0, arch)
    return head.ljust(64, b"\0") + payload


def library(*containers: bytes) -> bytes:
    """A 64-bit ELF file whose section .nv_fatbin has these."""
    fatbins = b"".join(fatbin.MAGIC + struct.pack("<HHQ", 1, 16, len(c)) + c for c in containers)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    data = bytearray(64) + fatbins + names
    data[:5] = fatbin.ELF_MAGIC
    struct.pack_into("<Q", data, 0x28, len(data))
    struct.pack_into("<HHH", data, 0x3A, 64, 2, 1)
    for name, at, size in ((1, 64, len(fatbins)), (12, 64 + len(fatbins), len(names))):
        data += struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 0, 0)
    return bytes(data)


def test_machine_code_of_other_gpus_is_blanked() -> None:
    """Offsets stay. Of a container without code for the GPU, PTX stays if it is wanted."""
    own = entry(fatbin.ELF, 80, b"A" * 40) + entry(fatbin.ELF, 90, b"B" * 48) + entry(fatbin.PTX, 90, b"C" * 56)
    compiled = entry(fatbin.PTX, 70, b"D" * 64) + entry(fatbin.PTX, 80, b"E" * 72) + entry(fatbin.PTX, 100, b"F" * 80)
    data = library(own, compiled)
    assert [(e.kind, e.arch, e.nbytes) for e in fatbin.entries(data)] == [
        (2, 80, 40), (2, 90, 48), (1, 90, 56), (1, 70, 64), (1, 80, 72), (1, 100, 80),
    ]  # fmt: skip
    for ptx, kept, figures in (
        (False, b"B", {"kept": 48, "blanked": 312, "without": 1}),
        (True, b"BE", {"kept": 120, "blanked": 240, "without": 0}),
    ):
        out, found = fatbin.pruned(data, 90, ptx=ptx)
        assert found == figures
        assert len(out) == len(data)
        for letter in b"ABCDEF":
            run = bytes([letter]) * 40
            assert (run in out) == (letter in kept)
    assert fatbin.pruned(data, 90, also=lambda payload: b"B" not in payload)[1]["without"] == 2
    assert fatbin.pruned(library(), 90) == (library(), {})


def test_kernels_of_flash_attention_are_chosen_by_their_names() -> None:
    name = b"CollectiveMainloopFwdSm90...ELi%dENS_10%sEfNS_4arch4Sm90ELb1ELb0E%sELb0E"
    needed = fatbin.flash3(("64", "128"))
    assert needed(b"no kernel of it")
    assert needed(name % (128, b"bfloat16_t", b"Lb0"))
    for other in ((256, b"bfloat16_t", b"Lb0"), (128, b"half_t", b"Lb0"), (128, b"bfloat16_t", b"Lb1")):
        assert not needed(name % other)


@pytest.mark.skipif(shutil.which("strip") is None, reason="binutils")
def test_only_libraries_are_thinned_out(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_bytes(b"no library")
    before = hashlib.sha256((tmp_path / "text.so").read_bytes()).digest()
    (tmp_path / "lib.so").write_bytes(library(entry(fatbin.ELF, 80, b"A" * 400)))
    figures = pack.thin(tmp_path, 90, ptx=False, heads=("64",))
    assert figures["lib.so"]["blanked"] == 400
    assert b"A" * 40 not in (tmp_path / "lib.so").read_bytes()
    assert hashlib.sha256((tmp_path / "text.so").read_bytes()).digest() == before


@pytest.mark.broad
def test_a_package_that_has_no_wheel_is_told(tmp_path: Path) -> None:
    with pytest.raises(unpack.PackError, match=r"no wheels for Python 3.12 of all of orjson==0.0.1"):
        pack.wheels_of(["orjson==0.0.1"], tmp_path)
