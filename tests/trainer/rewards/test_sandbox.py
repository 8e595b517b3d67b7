"""Programs in the sandbox: the forms of tests, and every way out that is known to be tried."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lacking import lacking
from tests.trainer.faults.runs import is_gone
from tests.waiting import wait_until
from trainer.config import CodeReward
from trainer.errors import RewardError
from trainer.rewards import RewardRequest, Score, Scorer, build_scorer
from trainer.rewards.bubblewrap import call_filter
from trainer.rewards.code import Case, program_in, read_cases
from trainer.rewards.sandbox import ADVICE, Limits, Sandbox
from trainer.rewards.sandboxed import canonical

DOUBLE = ["assert f(2) == 4", {"call": "f", "args": [3], "expected": 6}]
F = "def f(x):\n    return 2 * x"
SILENT = [{"input": "", "output": ""}]
STDIO = [{"input": "2\n", "output": "4\n"}, {"input": "21\n", "output": "42"}]
PATIENCE: dict[str, Any] = {"case_timeout_s": 60.0, "timeout_s": 120.0}  # for programs that end
HASTE: dict[str, Any] = {"case_timeout_s": 1.0, "timeout_s": 8.0}  # for those that would not


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    config = CodeReward(**PATIENCE, partial=True, output_kb=64, disk_mb=4, processes=8)
    try:
        built = build_scorer([config])
    except RewardError as error:
        if error.exit_code != 2:
            raise
        lacking(str(error))
    yield built
    built.close()


def judge(scorer: Scorer, program: str, tests: Any = None, **limits: Any) -> Score:
    """With other limits than the scorer's, for once."""
    request, code = RewardRequest("", program, "", {"tests": DOUBLE if tests is None else tests}), _code(scorer)
    usual, code._sandbox._limits = code._sandbox._limits, replace(code._sandbox._limits, **limits)
    try:
        return asyncio.run(scorer(request))
    finally:
        code._sandbox._limits = usual


def _code(scorer: Scorer) -> Any:
    return scorer._rewards["code"].reward


@pytest.mark.parametrize(
    ("program", "tests", "value"),
    [
        ("f = lambda x: 2 * x", DOUBLE, 1.0),
        ("f = lambda x: x + 2", DOUBLE, 0.5),
        ("def f(x): return", DOUBLE, 0.0),
        ("nonsense(", DOUBLE, 0.0),
        ("", DOUBLE, 0.0),
        ("print(2 * int(input()))", STDIO, 1.0),
        ("import sys\nprint(sum(2 * int(l) for l in sys.stdin), end='  \\n\\n')", STDIO, 1.0),
        ("print(4)", STDIO, 0.5),
        ("import sys\nprint(2 * int(input()))\nsys.exit(0)", STDIO, 1.0),
        ("f = lambda: (1, [2])", ["assert f() == (1, [2])", {"call": "f", "expected": [1, [2]]}], 1.0),
        ("f = lambda: (1, 2)", ["assert f() == [1, 2]"], 0.0),
        ("import math\nf = math.sqrt", ["import math\nassert math.isclose(f(2) ** 2, 2)", "assert 3.0 == f(9)"], 1.0),
        ("f = lambda k: {'a': [k]}", [{"call": "f", "kwargs": {"k": None}, "expected": {"a": [None]}}], 1.0),
        ("x" * 10 + " = 1\nf = len", [{"call": "f", "args": ["é\n"], "expected": 2}], 1.0),
        ("print(len(input()))", [{"input": "y" * 300_000, "output": "300000"}], 1.0),
        ("pass", SILENT, 1.0),
        ("while True: pass", SILENT, 0.0),
        ("while True: print('4')", STDIO, 0.0),
        (f"Wrong:\n```python\nf = 1\n```\nRight:\n```python3\n{F}\n```\nRun:\n```sh\nls\n```\nDone.", DOUBLE, 1.0),
    ],
)
def test_forms_of_tests(scorer: Scorer, program: str, tests: list[Any], value: float) -> None:
    result = judge(scorer, program, tests, **({} if value else HASTE))
    assert result.failures == {}
    assert result.total == value


@pytest.mark.parametrize(
    ("said", "expected", "passes"),
    [
        ("0.3333333333333333\n", "0.333333", True),
        ("0.33333", "0.333333", False),
        ("1.0", "1", True),
        ("1", "1.0", True),
        ("Case 1: 2.50 m", "Case 1: 2.5 m", True),
        ("-1e-7 3", "0.0 3", True),
        ("1000000001", "1000000000", False),
        ("12345678901234567890", "12345678901234567891", False),
        ("1e1", "10", True),
        ("1  2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("1\n", "1\n\n", True),
        ("nan", "nan", True),
        ("nan", "0.5", False),
        ("\u0663", "3", False),
        ("1e999999999", "10", False),
        ("9" * 5000, "9" * 5000 + ".5", True),
        ("8" * 5000, "9" * 5000 + ".5", False),
        ("v1.0", "v1.00", False),
    ],
)
def test_a_program_may_write_a_number_in_another_way(said: str, expected: str, passes: bool) -> None:
    case = Case({"input": ""}, expected)
    assert case.passed({"output": base64.b64encode(said.encode()).decode()}) is passes


CHECK = """
METADATA = {"author": "jt"}
def check(candidate):
    assert candidate(2) == 4, "doubles"
    for x in range(9, 12):
        assert candidate(x) == x + x
    ten = 10
    assert candidate(ten) == 20
"""


def test_a_function_that_checks_a_candidate_is_a_case_for_each_assertion(scorer: Scorer) -> None:
    """As HumanEval's tests are. Expected literals stay outside here too."""
    cases = read_cases(CHECK, "f")
    assert [case.expected for case in cases] == [4, True, 20]
    assert read_cases(CHECK + "check(f)") == cases
    assert judge(scorer, "f = lambda x: 2 * x", [CHECK + "check(f)"]).total == 1.0
    assert judge(scorer, "f = lambda x: x + 2", [CHECK + "check(f)"]).total == pytest.approx(1 / 3)


def test_what_one_test_has_started_is_not_counted_against_the_next(scorer: Scorer) -> None:
    """Five orphans a test, of eight processes that there may be at a time."""
    program = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid(); os.closerange(0, 64); time.sleep(600)
f = lambda x: 2 * x"""
    assert judge(scorer, program, ["assert f(2) == 4"] * 5).total == 1.0


def test_a_program_leaves_no_dead_process_behind_however_it_ends() -> None:
    """Number one of a container may be a trainer, which waits for its own children only."""
    script = """
import asyncio, ctypes, psutil
from trainer.errors import RewardError
from trainer.rewards import sandbox as module
from trainer.rewards.sandbox import Limits, Sandbox
module.LEAVE_S = 60.0
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become ours, as they do number one's
case = {"setup": "import time; time.sleep(600)", "expression": "1"}
sandbox = Sandbox(Limits(case_timeout_s=60.0, timeout_s=3.0))
asyncio.run(Sandbox(Limits(60.0, 120.0)).check())
try:
    asyncio.run(sandbox.run("", [case]))
except RewardError as error:
    assert error.code == "timeout"
    print([child.name() for child in psutil.Process().children(recursive=True)])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    if ADVICE in done.stderr:
        lacking(done.stderr)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_a_sandbox_ends_with_whoever_asked(scorer: Scorer) -> None:
    script = """
import asyncio
from trainer.rewards.sandbox import Limits, Sandbox
limits = Limits(case_timeout_s=600.0, timeout_s=600.0)
asyncio.run(Sandbox(limits).run("", [{"setup": "import time; time.sleep(600)", "expression": "1"}]))
"""
    asking = subprocess.Popen([sys.executable, "-c", script])
    started: set[int] = set()

    def is_running() -> bool:
        started.update(child.pid for child in psutil.Process(asking.pid).children(recursive=True))
        return len(started) >= 3  # bubblewrap, the runner, the program

    wait_until(is_running, 120, process=asking)
    asking.kill()
    asking.wait()
    wait_until(lambda: all(map(is_gone, started)), 60)


FENCED = {
    "no tag": f"Here:\n```\n{F}\n```",
    "python": f"```python\n{F}\n```\nDone.",
    "python3": f"```python3\n{F}\n```",
    "py3": f"```py3\n{F}\n```",
    "capitals": f"```Python\n{F}\n```",
    "words behind the tag": f'```python title="f.py" linenums\n{F}\n```',
    "attributes": f"```{{.python .numberLines}}\n{F}\n```",
    "space before the tag": f"``` python\n{F}\n```",
    "CRLF": f"Here:\n```python\n{F}\n```\n".replace("\n", "\r\n"),
    "tildes": f"~~~python\n{F}\n~~~",
    "three spaces": "   ```python\n   def f(x):\n       return 2 * x\n   ```",
    "in a list": "1. Double it:\n\n    ```python\n    def f(x):\n        return 2 * x\n    ```\n2. Done.",
    "in a quotation": "> ```python\n> def f(x):\n>     return 2 * x\n> ```",
    "in tags": f"<think>Twice.</think><answer>```python\n{F}\n```</answer>",
    "below a tag": f"<answer>\n```python\n{F}\n```\n</answer>",
    "a wrong one before": f"Wrong:\n```python\nf = 1\n```\nRight:\n```python\n{F}\n```",
    "its output": f"```python\n{F}\nprint(f(2))\n```\nOutput:\n```\n4\n```",
    "its output, with a tag": f"```\n{F}\n```\nOutput:\n```text\n4\n```",
    "a shell block before": f"```bash\npip install numpy\n```\n```python\n{F}\n```",
    "a shell block behind": f"```python\n{F}\n```\nRun it:\n```sh\nls\n```",
    "usage without a tag": f"```py\n{F}\n```\nUsage:\n```\nf(2)\n```",
    "C++ and an unnamed one": f"```cpp\nint f(int x);\n```\n```\n{F}\n```",
    "another tag": f"```solution\n{F}\n```",
    "stray closing fence": f"```python\n{F}\n```\n```\n",
    "opened by the prompt": f"{F}\n```\nThis doubles x.",
    "closing fence alone": f"{F}\n```",
    "cut": f"Here:\n```python\n{F}",
    "cut behind it": f"```python\n{F}\n```\nThen\n```bash\npython f",
    "longer closing fence": f"```python\n{F}\n`````\nDone.",
    "no fence": F,
}


@pytest.mark.parametrize("way", FENCED)
def test_a_program_is_found_however_it_is_fenced(way: str) -> None:
    assert program_in(FENCED[way]).strip().removesuffix("\nprint(f(2))") == F


def test_shorter_and_other_fences_do_not_end_a_block() -> None:
    inner = 'DOC = """\n```python\nf(2)\n```\n"""'
    for fence in ("````", "~~~"):
        assert program_in(f"{fence}python\n{inner}\n{fence}\nDone.").strip() == inner
    assert program_in('```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```').count("```") == 2


@pytest.mark.parametrize("deep", ["a+" * 60_000 + "a", "-" * 60_000 + "1", "(" * 60_000, "not " * 16_000 + "1"])
def test_a_block_nested_too_deep_is_no_program(deep: str) -> None:
    assert program_in(f"```\n{F}\n```\n```\n{deep}\n```").strip() == F


FUNCTIONAL = {"input": "2", "output": "4", "testtype": "functional"}
UNNAMED = "def check(candidate):\n    assert candidate(2) == 4"


@pytest.mark.parametrize(
    "test",
    [1, {}, "f(2)", "assert", "x ==", {"call": "f"}, FUNCTIONAL, UNNAMED, "def check(candidate): pass\ncheck(f)"],
)
def test_a_test_in_no_known_form_is_a_failure(scorer: Scorer, test: Any) -> None:
    assert judge(scorer, "f = 1", [test]).failures
    with pytest.raises(RewardError):
        read_cases(test)


def test_a_record_without_tests_is_a_failure(scorer: Scorer) -> None:
    assert "no tests" in judge(scorer, "f = 1", []).failures["code"]


REPLY = """b'{"case": 0, "value": "4"}\\n'"""
ESCAPES = {
    "faked success": f"import os\nos.write(1, {REPLY}); f = lambda x: None",
    "faked equality": """
class Yes:
    __eq__ = lambda s, o: True
    __repr__ = lambda s: "Yes()"
f = lambda x: Yes()""",
    "faked replies everywhere": f"""
import os
for n in range(64):
    try: os.write(n, {REPLY})
    except OSError: pass
os._exit(0)""",
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "endless loop": "while True: pass",
    "endless loop deaf to signals": """
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass""",
    "sleep": "import time; time.sleep(600)",
    "memory": "x = b'x' * (1 << 33)",
    "recursion": "def g(): g()\nimport sys; sys.setrecursionlimit(10**9); g()",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "daemons": """
import os, time
for _ in range(4):
    if os.fork() == 0:
        os.setsid(); time.sleep(600)
os._exit(0)""",
    "kill everybody": "import os\nos.kill(-1, 9)",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)",
    "kill number one": "import os\nos.kill(1, 9)",
    "output flood": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "value flood": "f = lambda x: 'x' * (1 << 27)",
}


@pytest.mark.parametrize("program", ESCAPES.values(), ids=ESCAPES.keys())
def test_what_cheats_or_breaks_gains_nothing_and_the_next_is_served(scorer: Scorer, program: str) -> None:
    began = time.monotonic()  # where there is no f, one test is as good as two
    assert judge(scorer, program, DOUBLE if "f = " in program else DOUBLE[:1], **HASTE).total == 0.0
    assert time.monotonic() - began < 120, "it was ended"
    assert judge(scorer, "f = lambda x: 2 * x").total == 1.0


LIBC = "import ctypes, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)"


def run(program: str, expression: str = "f(2)", setup: str = "", mib: int = 256) -> dict[str, Any]:
    """A sandbox's answer to an expression behind a program."""
    allowed = Limits(memory_bytes=mib << 20, disk_bytes=4 << 20, **PATIENCE)
    (outcome,) = asyncio.run(Sandbox(allowed).run(program, [{"setup": setup, "expression": expression}]))
    return outcome


def seen(scorer: Scorer, expression: str, setup: str = LIBC) -> Any:
    """A program's findings about its surroundings: the value of an expression, told as the result of a call."""
    outcome = run("", f"repr({expression})", setup)
    return outcome.get("value", outcome.get("error"))


def test_no_network(scorer: Scorer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nf = lambda x: 2 * x"
        assert judge(scorer, program).total == 0.0
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()
    devices = seen(scorer, "open('/proc/net/dev').read()")
    assert "lo:" in devices
    assert "eth" not in devices


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"])
def test_sockets_of_other_families_than_unix_s_are_refused(scorer: Scorer, family: str) -> None:
    """A network namespace does not hold them all: AF_VSOCK reaches the hypervisor."""
    asked = f"socket.socket(socket.{family}, socket.SOCK_{'SEQPACKET' if family == 'AF_ALG' else 'DGRAM'})"
    assert "[Errno 97]" in seen(scorer, asked)
    assert "[Errno 97]" in seen(scorer, asked.replace("DGRAM", "STREAM"))
    assert "family=1" in seen(scorer, "[socket.socket(socket.AF_UNIX), *socket.socketpair()]")


HOGS = """
import os, time
def hold(mib):
    kept = bytearray(mib << 20)
    for i in range(0, len(kept), 4096):
        kept[i] = 1
    time.sleep(30)
def f(x):
    for _ in range(6):
        if os.fork() == 0:
            hold(100)
    time.sleep(30)
"""
SHARED_HOG = HOGS.replace("bytearray(mib << 20)", "__import__('mmap').mmap(-1, mib << 20)")


@pytest.mark.parametrize("program", [HOGS, SHARED_HOG], ids=["private", "shared"])
def test_memory_of_all_processes_together_is_bounded(scorer: Scorer, program: str) -> None:
    assert "268435456 bytes of memory together" in run(program)["error"]


def test_many_small_processes_are_not_too_much_memory(scorer: Scorer) -> None:
    """Memory that each process has from its birth counts once."""
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.5)  # the supervisor looks at them several times
        os._exit(0)
f = lambda x: 2 * x
"""
    assert run(program, mib=40) == {"case": 0, "value": "4"}


COLLIDING = "{" + ",".join(str(i * ((1 << 61) - 1)) for i in range(1, 20_000)) + "}"


@pytest.mark.parametrize("text", [COLLIDING, COLLIDING.replace(",", ":0,").replace("}", ":0}"), "-" * 60_000 + "1"])
def test_nothing_that_a_program_wrote_is_evaluated_outside(
    text: str, scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that all have one hash make a set that takes the square of their count: minutes, beyond all limits."""
    forged = {"case": 0, "value": text}
    (case,) = read_cases("assert f() == {1, 2}")
    monkeypatch.setattr("ast.literal_eval", lambda text: pytest.fail("a program's text is evaluated"))
    assert not case.passed(forged)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({1, 2.0}, {2, True}), ({"b": [1], "a": 2}, {"a": 2, "b": [True]}), (1.0, 1), (-0.0, 0), (1 + 0j, 1),
        ((), ()), (set(), set()), ({}, {}), ({(1, 2): {3}}, {(1, 2): {3}}), (b"x", b"x"), (None, None), (1.5, 1.5),
        (Counter("aab"), {"a": 2, "b": 1}), (defaultdict(list, {1: [2]}), {1: [2]}), (OrderedDict(a=1), {"a": 1}),
        (namedtuple("P", "x y")(1, 2), (1, 2)), (IntEnum("E", "A").A, 1), (bytearray(b"x"), b"x"),
        (frozenset({1}), {1}), (Decimal(2), 2), (Decimal("0.5"), 0.5), (Fraction(4, 2), 2),
        (type("L", (list,), {})([1]), [1]), (type("S", (str,), {"__repr__": lambda self: "?"})("x"), "x"),
    ],
)  # fmt: skip
def test_values_that_are_equal_are_told_alike(value: Any, expected: Any) -> None:
    assert value == expected
    assert canonical(value) == canonical(expected)


def test_values_that_differ_are_told_apart() -> None:
    values = [
        (), [], {}, set(), "", b"", None, 0, 1, 1.5, "1", (1,), [1], {1}, {1: 1}, ([1], 1), ([1, 1],), "[1]", 2j, ...,
    ]  # fmt: skip
    assert len({canonical(value) for value in values}) == len(values)
    assert canonical((1, [(2,)]), tuples=False) == canonical([1, [[2]]])
    for value in (object(), Ellipsis.__class__, Decimal("0.1"), Fraction(1, 3), range(2)):
        with pytest.raises(TypeError, match="no literal"):
            canonical(value)


HIDDEN = ["/etc/shadow", "/etc/passwd", str(Path(__file__)), str(Path.home() / ".bashrc"), "/sys/kernel"]
LOCKED = ["/x", "/usr/x", "/dev/x", "/bin/x", "/runner.py", "/proc/sys/kernel/hostname"]  # all but /tmp
# With a user namespace come capabilities, which are enough to mount a file system in memory of any size.
NAMESPACES = {"user": "0x10000000", "mount": "0x20000", "net": "0x40000000"}
CLONE = 56 if platform.machine() == "x86_64" else 220
REFUSED: dict[str, tuple[str, str]] = {
    **{f"see {path}": (f"os.path.exists({path!r})", "False") for path in HIDDEN},
    **{f"write {path}": (f"open({path!r}, 'w').write('x')", "Error") for path in LOCKED},
    **{
        f"unshare {name}": (f"(libc.unshare({flags}), ctypes.get_errno())", "(-1, 1)")
        for name, flags in NAMESPACES.items()
    },
    **{
        f"clone {name}": (f"(libc.syscall({CLONE}, {flags} | 17, 0, 0, 0, 0), ctypes.get_errno())", "(-1, 1)")
        for name, flags in NAMESPACES.items()
    },
    "attach to number one": ("libc.ptrace(16, 1, 0, 0)", "-1"),
    "attach to the parent": ("libc.ptrace(16, os.getppid(), 0, 0)", "-1"),
    "mount": ("libc.mount(b'/', b'/tmp', b'', 4096, None)", "-1"),
    "change the root": ("os.chroot('/tmp')", "Error"),
    "write the supervisor's replies": ("open(f'/proc/{os.getppid()}/fd/1', 'w')", "Error"),
    "memory behind a descriptor": ("os.memfd_create('x')", "PermissionError"),
}


@pytest.mark.parametrize("attempt", REFUSED)
def test_a_program_cannot(scorer: Scorer, attempt: str) -> None:
    expression, told = REFUSED[attempt]
    assert told in seen(scorer, expression)


def test_the_disk_is_small_and_forgotten(scorer: Scorer) -> None:
    assert "5" in seen(scorer, "open('/tmp/x', 'w').write('small')")
    assert "False" in seen(scorer, "os.path.exists('/tmp/x')")
    fill = "for n in range(100):\n  open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))"
    assert "Error" in seen(scorer, "1", setup=fill)
    assert "Error" in seen(scorer, "1", setup=fill.replace("/tmp/", "/dev/shm/"))


def test_no_environment_no_privileges_no_other_processes(scorer: Scorer) -> None:
    os.environ["HOTSWAP_TEST_SECRET"] = "secret"
    try:
        assert "secret" not in seen(scorer, "dict(os.environ)")
    finally:
        del os.environ["HOTSWAP_TEST_SECRET"]
    status = seen(scorer, "open('/proc/self/status').read()").replace("\\\\", "\\")
    assert "CapEff:\\t0000000000000000" in status
    assert "NoNewPrivs:\\t1" in status
    processes = json.loads(seen(scorer, "sorted(int(p) for p in os.listdir('/proc') if p.isdigit())").strip("'\""))
    assert max(processes) < 20
    assert "Error" in seen(scorer, "os.setuid(0)") or "True" in seen(scorer, "os.getuid() != 0")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_a_program_of_whole_instructions_that_ends_in_leave(machine: str) -> None:
    program = call_filter(machine)
    assert program is not None
    assert len(program) % 8 == 0
    assert program[-8:] == struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
    assert call_filter("pdp11") is None


def test_nothing_is_left_behind(scorer: Scorer) -> None:
    before = {p.pid for p in psutil.process_iter()}
    judge(scorer, ESCAPES["daemons"], DOUBLE[:1], **HASTE)
    judge(scorer, ESCAPES["fork bomb"], DOUBLE[:1], **HASTE)
    there = {p.pid for p in psutil.process_iter()} - before  # other tests' sandboxes too, which end as well

    def nothing() -> bool:
        left = [p for p in psutil.process_iter(["name", "cmdline"]) if p.pid in there]
        return not [p for p in left if "runner.py" in " ".join(p.info["cmdline"] or [])]

    wait_until(nothing, 150)


def test_without_bubblewrap_it_is_refused_unless_the_user_opts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rewards.bubblewrap.binary", lambda: None)
    with pytest.raises(RewardError, match="sandbox to none"):
        build_scorer([CodeReward()])
    scorer = build_scorer([CodeReward(sandbox="none", **PATIENCE)])
    assert judge(scorer, "f = lambda x: 2 * x").total == 1.0
    assert judge(scorer, "while True: pass", DOUBLE[:1], **HASTE).total == 0.0
    assert judge(scorer, "x = b'x' * (1 << 33)").total == 0.0
    scorer.close()


def test_namespaces_that_are_refused_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rewards.bubblewrap.binary", lambda: "/bin/false")
    with pytest.raises(RewardError, match="allow user namespaces"):
        build_scorer([CodeReward()])
