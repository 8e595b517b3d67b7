"""A process that is to end with the one that began it ends, however early that one was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from weightsync.dying import die_with


@pytest.mark.parametrize("early", [True, False], ids=["before it asks", "after it has asked"])
def test_a_child_ends_with_its_parent(early: bool) -> None:
    """The test's pipe is open for as long as the child lives. Only a child that outlives the parent writes into it."""
    ended, alive = os.pipe()
    asks, parent_is_dead = os.pipe()
    if not (parent := os.fork()):
        us = os.getpid()
        if os.fork():
            signal.pause()
        if early:
            os.read(asks, 1)
        die_with(us, signal.SIGKILL)
        os.write(alive, b"asked")
        signal.pause()
    os.close(alive)
    if not early:
        assert os.read(ended, 5) == b"asked"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.write(parent_is_dead, b"x")
    assert os.read(ended, 5) == b"", "the child has ended, and with it the last writer"
    for descriptor in (ended, asks, parent_is_dead):
        os.close(descriptor)


def test_a_subprocess_ends_with_the_process_that_starts_it() -> None:
    program = "import subprocess, sys; from weightsync.dying import with_me; "
    program += "subprocess.Popen(['sleep', '3600'], preexec_fn=with_me()); print('begun', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "begun\n"
        process.kill()
        assert process.stdout.read() == "", "`sleep` has it open too, until it ends"
