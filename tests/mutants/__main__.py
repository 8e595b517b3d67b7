"""`python -m tests.mutants [WORD ...]`: applies each mutation (of files whose path has a WORD) to a copy of the tree,
and runs the tests that must notice it. Fails when one survives that mutations.py does not explain."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
LIMIT_S = 600  # a test that hangs has noticed


def main(words: list[str]) -> int:
    """The exit status."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.file for word in words)]
    with tempfile.TemporaryDirectory(prefix="hotswap-mutants-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        if verdict(tree, tuple(sorted({test for m in chosen for test in m.tests}))) != "survived":
            print("the tests fail without a mutation: mend that first")
            return 2
        bad = [m for m in chosen if not holds(tree, m)]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} mutations were noticed or are explained")
    return 1 if bad else 0


def holds(tree: Path, mutation: Mutation) -> bool:
    """Whether the mutation is noticed, or explained."""
    file = tree / mutation.file
    source, started = file.read_text(), time.monotonic()
    file.write_text(source.replace(mutation.old, mutation.new))
    try:
        found = verdict(tree, mutation.tests)
    finally:
        file.write_text(source)
    line = source[: source.index(mutation.old)].count("\n") + 1
    print(
        f"{found:9} {time.monotonic() - started:5.0f} s  {mutation.file}:{line}  {mutation.new.strip()[:80]!r}",
        flush=True,
    )
    if mutation.explained and found == "survived":
        print(f"{'':9}          {mutation.explained}")
    return found == "killed" or (found == "survived" and bool(mutation.explained))


def verdict(tree: Path, tests: tuple[str, ...]) -> str:
    """ "killed", "survived", or "broken": the tests could not even be collected."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu and not soak and not broad", "-p"]
    command += ["no:cacheprovider", "--only-rerun", "never", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "HOTSWAP_PURE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "killed"
    return {0: "survived", 1: "killed"}.get(done.returncode, "broken")


def copy_tree(tree: Path) -> None:
    """All files of the repository as they are here."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
