"""Runs the tests that a change reaches, the nearest first: `make quick`, and for the second tier `.ci/run`.

A change is what differs from the landed main, uncommitted and untracked files included; on main itself, with nothing
else, the last commit. `--replay N` runs nothing: it says what the last N commits would have waited for.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from scripts import reach
from scripts.reach import ROOT, Graph, Module, Node, git
from tests import tiers

AT_ONCE = 2.7  # seconds of test in a second of a run, with three workers on two cores
SMOKE = (  # when nothing is reached
    "tests/test_imports.py", "tests/test_readme.py", "tests/server/gateway/test_openapi.py",
    "tests/weightsync/format/test_manifest.py", "tests/trainer/test_batch.py",
)  # fmt: skip
EXPRESSIONS = {tiers.FIRST: "not gpu and not soak and not broad", tiers.SECOND: "broad and not gpu and not soak"}
UNKNOWN_S = 20.0  # of a file of a tier of which nothing is recorded


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="a commit; by default where this branch left the landed main")
    parser.add_argument("--tier", choices=[*EXPRESSIONS], default=tiers.FIRST)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds, after which no test is begun")
    parser.add_argument("--why", action="store_true", help="say by what each file is reached")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--replay", type=int, default=0, metavar="N")
    options = parser.parse_args()
    if options.replay:
        replay(options.replay)
        return 0
    base = _base(options.base)
    ways = reached(reach.load(), base)
    files = [path for path in ways if is_of(path, options.tier)]
    seconds = Seconds(options.tier)
    chosen, left = fitting(files, seconds, options.limit * AT_ONCE)
    against = git("log", "-1", "--format=%h %s", base).strip()
    print(f"quick: files of the {options.tier} tier that the changes since {against} reach: {len(files)}")
    if not files and options.tier == tiers.FIRST:
        chosen = [path for path in SMOKE if (ROOT / path).is_file()]
        print("quick: nothing is reached, so a few tests of each package run")
    total = sum(map(seconds.of, chosen))
    print(f"quick: running {len(chosen)}: {total:.0f} s of test, about {total / AT_ONCE / 60:.1f} minutes", flush=True)
    for path in left:
        print(f"quick: left out for its time, beyond {options.limit:.0f} s: {path} ({seconds.of(path):.0f} s)")
    for path in chosen if options.why else ():
        print(f"{seconds.of(path):6.1f} s  {path}  {said(ways[path]) if path in ways else 'nothing is reached'}")
    if not chosen:
        return 0
    command = [sys.executable, "-m", "pytest", *chosen, "-m", EXPRESSIONS[options.tier]]
    command += ["-n", str(min(options.jobs, len(chosen))), "--dist", "loadfile", "--no-loadscope-reorder"]
    sys.stdout.flush()
    environment = os.environ | {tiers.AS_NAMED: "1", tiers.UNTIL: str(time.time() + options.limit)}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return 0 if status == 5 else status  # 5: these files have no test of this tier


def _base(asked: str) -> str:
    if asked:
        return git("rev-parse", "--verify", f"{asked}^{{commit}}").strip()
    known = git("for-each-ref", "--format=%(refname)", "refs/remotes/origin/main", "refs/heads/main").split()
    if not known:
        sys.exit("quick: there is no branch main to compare with: name a commit with BASE=")
    head, base = git("rev-parse", "HEAD").strip(), git("merge-base", "HEAD", max(known)).strip()
    return f"{head}^" if head == base and not git("status", "--porcelain") else base


def reached(graph: Graph, base: str) -> dict[str, list[Node]]:
    """Files of tests that differ from `base` or use what does, the nearest first; each with the way to it."""
    paths = git("diff", "--name-only", "--no-renames", "-z", base) + git("ls-files", "-oz", "--exclude-standard")
    changed = set[Node]()
    for path in filter(None, paths.split("\0")):
        old = git("show", f"{base}:{path}") if git("ls-tree", base, "--", path) and reach.is_module(path) else None
        file = ROOT / path
        changed |= _names(path, old, file.read_text() if file.is_file() and reach.is_module(path) else None)
    return every(graph, changed)


def _names(path: str, old: str | None, new: str | None) -> set[Node]:
    try:
        return reach.changed_names(path, old, new)
    except SyntaxError:  # pytest will say where
        return {(path, "")}


def every(graph: Graph, changed: set[Node]) -> dict[str, list[Node]]:
    found = graph.reached(changed)
    if common := next((path for path, name in sorted(changed) if not name and path.startswith(reach.ALL)), None):
        tests = sorted(module.path for module in graph.modules.values() if reach.is_tests(module.path))
        found |= {path: [(common, ""), (path, "")] for path in tests if path not in found}
    return found


def said(way: Iterable[Node]) -> str:
    return " <- ".join(":".join(filter(None, node)) for node in way)


def is_of(path: str, tier: str) -> bool:
    """Whether the file may have tests of this tier."""
    text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
    if tier == tiers.SECOND:
        return "mark.broad" in text or "mark.sample" in text
    return not re.search(r"^pytestmark = .*mark\.broad", text, re.MULTILINE)


class Seconds:
    """Of test, by file, as they were recorded; of a file that is not known, what others of its folder take."""

    def __init__(self, tier: str) -> None:
        self._known = tiers.recorded()[tier]
        self._usual = statistics.fmean(self._known.values()) if self._known else UNKNOWN_S

    def of(self, path: str) -> float:
        if path in self._known:
            return self._known[path]
        near = [took for other, took in self._known.items() if Path(other).parent == Path(path).parent]
        return statistics.fmean(near) if near else self._usual


def fitting(files: list[str], seconds: Seconds, limit: float) -> tuple[list[str], list[str]]:
    """The first of these files that take no longer than `limit` together, and the others."""
    spent, count = 0.0, 0
    for path in files:
        spent += seconds.of(path)
        if spent > limit:
            break
        count += 1
    return files[:count], files[count:]


def replay(count: int) -> None:
    """Prints what the selection would have been for the last `count` commits that are no merges."""
    modules: dict[tuple[str, str], Module] = {}
    seconds, taken = Seconds(tiers.FIRST), list[tuple[float, int]]()
    whole = sum(tiers.recorded()[tiers.FIRST].values())
    blobs = subprocess.Popen(
        ["git", "cat-file", "--batch"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False
    )

    def read(blob: str) -> str:
        assert blobs.stdin is not None
        assert blobs.stdout is not None
        blobs.stdin.write(f"{blob}\n".encode())
        blobs.stdin.flush()
        size = int(blobs.stdout.readline().split()[2])
        return blobs.stdout.read(size + 1)[:size].decode(errors="replace")

    for commit in git("log", "--no-merges", f"-{count}", "--format=%H").split():
        tree = {}
        for line in filter(None, git("ls-tree", "-rz", commit).split("\0")):
            tree[line.partition("\t")[2]] = line.split()[2]
        changed = set[Node]()
        for line in git("diff-tree", "-r", "--no-renames", "--no-abbrev", f"{commit}^", commit).splitlines():
            old, new, path = line.split()[2], line.split()[3], line.partition("\t")[2]
            python = reach.is_module(path)
            changed |= _names(path, *(read(b) if python and set(b) != {"0"} else None for b in (old, new)))
        for path, blob in tree.items():
            if reach.is_module(path) and (path, blob) not in modules:
                modules[path, blob] = Module(path, read(blob))
        of = {path: modules[path, blob] for path, blob in tree.items() if reach.is_module(path)}
        files = every(Graph(of, [path for path in tree if path not in of]), changed) if changed else {}
        files = [path for path in files if is_of(path, tiers.FIRST)]
        taken.append((min(whole, sum(map(seconds.of, files))), len(files)))
        print(f"{commit[:8]} {taken[-1][1]:4} files {taken[-1][0]:6.0f} s", file=sys.stderr, flush=True)
    blobs.kill()
    taken.sort()
    print("| of the commits | reach at most: files | seconds of test | minutes |\n|---|---|---|---|")
    for share in (0.25, 0.5, 0.75, 0.9, 1.0):
        took, files_ = taken[max(0, round(share * len(taken)) - 1)]
        print(f"| {share:.0%} | {files_} | {took:.0f} | {took / AT_ONCE / 60:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
