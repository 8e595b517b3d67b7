"""`python -m tests.mutants [WORD ...]`: applies each mutation (of files whose path has a WORD) to a copy of the tree,
and runs the tests that must notice it. Fails when one survives that the list does not explain, or when what it
changes is not in the code any more.

Each run is a fork of this process, which has imported what is slow to import and nothing of the project.
"""

from __future__ import annotations

import compileall
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from py_compile import PycInvalidationMode

import hypothesis
import pytest
import torch  # noqa: F401 - slow to import

from .mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TEST_S, LIMIT_S = 60, 600  # of a test, and of those of one mutation: what hangs has noticed
FORK = multiprocessing.get_context("fork")


def main(words: list[str]) -> int:
    """The exit status."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.file for word in words)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hotswap-mutants-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        if verdict(tree, tuple(dict.fromkeys(test for m in chosen for test in m.tests)), quiet=False) != "survived":
            print("the tests fail without a mutation: mend that first")
            return 2
        bad = [m for m in chosen if not holds(tree, m)]
    minutes = (time.monotonic() - started) / 60
    print(
        f"{len(chosen) - len(bad)} of {len(chosen)} mutations were noticed or are explained, in {minutes:.0f} minutes"
    )
    for mutation in bad:
        print(f"  not noticed: {mutation.name}")
    return 1 if bad or not chosen else 0


def holds(tree: Path, mutation: Mutation) -> bool:
    """Whether the mutation is noticed, or explained."""
    file = tree / mutation.file
    source, started = file.read_text() if file.is_file() else "", time.monotonic()
    found = "missing"
    if source.count(mutation.old) == 1:
        file.write_text(source.replace(mutation.old, mutation.new))
        try:
            found = verdict(tree, mutation.tests)
        finally:
            file.write_text(source)
    print(f"{found:9} {time.monotonic() - started:5.0f} s  {mutation.name}", flush=True)
    if mutation.explained and found == "survived":
        print(f"{'':9}          {mutation.explained}")
    return found == "killed" or (found == "survived" and bool(mutation.explained))


def verdict(tree: Path, tests: tuple[str, ...], *, quiet: bool = True) -> str:
    """ "killed", "survived", or "broken": the tests could not even be collected."""
    run = FORK.Process(target=run_tests, args=(tree, tests, quiet))
    run.start()
    run.join(LIMIT_S)
    if run.exitcode is None:
        assert run.pid is not None
        os.killpg(run.pid, signal.SIGKILL)
        run.join()
        return "killed"
    return {0: "survived", 1: "killed"}.get(run.exitcode, "broken")


def run_tests(tree: Path, tests: tuple[str, ...], quiet: bool) -> None:
    """In a process of its own: from here on the project is what lies in `tree`."""
    os.setsid()
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    looking = [p for p in hypothesis.Phase if p is not hypothesis.Phase.shrink]  # any example that fails will do
    hypothesis.settings.register_profile("mutants", phases=looking, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    if quiet:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
    options = ["-x", "-q", "--disable-warnings", "-m", "not gpu and not soak and not broad", "-p", "no:cacheprovider"]
    options += ["--timeout", str(TEST_S), "-k", "not etcd"]  # one store will do
    sys.exit(pytest.main([*options, *tests]))


def copy_tree(tree: Path) -> None:
    """All files of the repository as they are here, compiled once; what is mutated is compiled anew by its hash."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    compileall.compile_dir(tree, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
