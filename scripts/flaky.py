"""`make flaky TEST=... N=20 LOAD=2`: runs tests N times, JOBS of them at once, beside LOAD processes that keep a core
busy each. Says how many runs failed, shows the first of these and keeps its output."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from weightsync.dying import with_me

SHOWN = 60  # lines at the end of a failed run's output


def main() -> int:
    """The exit status: 1 if a run has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="+", help="files, folders or single tests, as pytest names them")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--load", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if not all(options.tests):
        parser.error("no test is named: make flaky TEST=tests/test_readme.py")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", *options.tests]
    print(f"{options.times} runs of `{' '.join(['pytest', '-x', *options.tests])}` beside {options.load} busy loops")
    directory = Path(tempfile.mkdtemp(prefix="hotswap-flaky-"))
    logs = [directory / f"{number}.log" for number in range(1, options.times + 1)]
    with busy(options.load), concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool:
        passed = list(pool.map(lambda log: _passes(command, log), logs))
    failed = [log for log, well in zip(logs, passed, strict=True) if not well]
    for log in set(logs) - set(failed):
        log.unlink()
    if not failed:
        directory.rmdir()
        print(f"\nall {options.times} runs passed")
        return 0
    print(f"\n{len(failed)} of {options.times} runs failed. The end of {failed[0]}:")
    print("\n".join(failed[0].read_text(errors="replace").splitlines()[-SHOWN:]))
    return 1


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing else than to use a core each."""
    spin = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(spin, preexec_fn=with_me()) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _passes(command: list[str], log: Path) -> bool:
    began = time.monotonic()
    with log.open("wb") as said:
        status = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False)
    passed = status.returncode == 0
    print("." if passed else f"\nF {log} ({time.monotonic() - began:.0f} s)", end="" if passed else "\n", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
