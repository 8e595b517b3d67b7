"""The image is built of files that are there, for each accelerator, and runs without privileges."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ACCELERATORS = ["cpu", "cuda"]

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
    assert name == "python:3.11-slim-bookworm"
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
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} - {"tests"} <= set(copied)


@pytest.mark.parametrize("accel", ACCELERATORS)
def test_the_pinned_list_of_the_accelerator_is_installed_as_it_is(accel: str) -> None:
    runs = [string.Template(run).safe_substitute(ACCEL=accel) for run in of(chain(accel, "build"), "RUN")]
    (install,) = [run for run in runs if f"scripts/install.sh /opt/venv requirements/{accel}.txt" in run]
    assert all((ROOT / "requirements" / f"{name}.txt").exists() for name in (accel, f"extras-{accel}"))
    tools = re.search(r"grep -E '(.*?)'", install)
    assert tools is not None
    lines = (ROOT / "requirements" / "test.txt").read_text().splitlines()
    assert any(line.startswith("mypy==") and re.match(tools[1], line) for line in lines)


def test_the_compiler_runs_before_what_it_has_made_is_installed() -> None:
    (run,) = [run for run in of(stages("cpu")["build"][1], "RUN") if "server.gateway.compiled" in run]
    assert re.search(r"server\.gateway\.compiled\s+&& pip install --no-deps --no-build-isolation /src", run)
