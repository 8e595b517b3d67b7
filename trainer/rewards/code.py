"""The code reward: does the program in an answer pass its tests? Expected results stay outside of the sandbox.
docs/trainer/rewards.md has the forms of a test; a record's `extra["tests"]` is a list of them."""

from __future__ import annotations

import ast
import asyncio
import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from markdown_it import MarkdownIt

from trainer.config import CodeReward
from trainer.errors import RewardError
from trainer.rewards.sandbox import Limits, Sandbox
from trainer.rewards.sandboxed import canonical
from trainer.rewards.scorer import Reward, RewardRequest

# Blocks alone, and of those no HTML: Markdown takes a fence right below a line `<answer>` for a part of that.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "code", "list", "blockquote"])
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])
_BESIDE_A_TAG = re.compile(r"(?<=\w>)[ \t]*(?=```)|(?<=```)[ \t]*(?=</\w)")
_SPACE = re.compile(r"(\s+)")
_NUMBER = re.compile(r"[+-]?[0-9]+(?P<fraction>\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?", re.IGNORECASE)
TOLERANCE = Decimal("1e-6")  # relative or absolute, as judges of programming contests have it
_PYTHON = re.compile(r"\W*(?:python|py)[\d.]*\b", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """A question to the sandbox and the expected outcome: a value, or a text for `{"input": ...}`."""

    asked: dict[str, Any]
    expected: Any

    @property
    def tuples(self) -> bool:
        """Whether a tuple is something else than a list (JSON has only lists)."""
        return bool(self.asked.get("tuples", True))

    def passed(self, outcome: dict[str, Any]) -> bool:
        """Whether the outcome is the expected one. A value comes as its canonical text; only literals can be equal.

        Nothing that a program wrote is evaluated here, where no limits hold.
        """
        if "input" in self.asked:
            said = outcome.get("output")  # none when it took too long or said too much, which is not an empty one
            return said is not None and _prints(base64.b64decode(said).decode(errors="replace"), self.expected)
        return bool(outcome.get("value") == canonical(self.expected, tuples=self.tuples))


def program_in(answer: str) -> str:
    """The last fenced block whose tag is Python's. Without one, the last that is Python, of those without a tag first;
    then what stands before the first fence (a prompt may have opened the block). Else all of the answer."""
    text = _BESIDE_A_TAG.sub("\n", answer.replace("\r\n", "\n"))
    fences = [token for token in reversed(_MARKDOWN.parse(text)) if token.type == "fence"]
    tagged = (fence.content for fence in fences if _PYTHON.match(fence.info) and fence.content.strip())
    others = [fence.content for fence in sorted(fences, key=lambda fence: bool(fence.info.strip()))]
    before = "\n".join(text.split("\n")[: (fences[-1].map or [0])[0]] if fences else "")
    return next(tagged, None) or next(filter(_is_python, [*others, before]), answer)


def _is_python(text: str) -> bool:
    """Whether there are statements in it. A long text is not tried: at worst, the time grows with its square."""
    try:
        return len(text) <= 65536 and bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: it is nested too deep
        return False


def read_cases(test: Any, entry_point: Any = None) -> list[Case]:
    """A test of a record. Raises RewardError for one in no known form."""
    if isinstance(test, str):
        return _checks(_statements(test), test, entry_point)
    if isinstance(test, dict) and test.get("testtype") == "functional":
        raise RewardError(f"a test calls a function, and names none: {test!r}. Write it as a call.")
    if isinstance(test, dict) and "input" in test and "output" in test:
        return [Case({"input": str(test["input"])}, str(test["output"]))]
    if isinstance(test, dict) and "call" in test and "expected" in test:
        call = f"{test['call']}(*{test.get('args', [])!r}, **{test.get('kwargs', {})!r})"
        return [Case({"setup": "", "expression": call, "tuples": False}, test["expected"])]
    raise RewardError(f"a test is in no known form: {test!r}. Write an assertion, a call, or input and output.")


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError as error:
        raise RewardError(f"a test is not Python: {source!r} ({error.msg}).") from None


def _checks(statements: list[ast.stmt], source: str, entry_point: Any) -> list[Case]:
    """Of a function `check` as many as it has assertions: each is a case, after the statements before it."""
    if statements and isinstance(statements[-1], ast.Assert):
        return [_assertion(statements[:-1], statements[-1])]
    check = next((s for s in statements if isinstance(s, ast.FunctionDef) and s.name == "check" and s.args.args), None)
    if check is None or not any(isinstance(inside, ast.Assert) for inside in ast.walk(check)):
        raise RewardError(f"a test asserts nothing at its end: {source!r}.")
    calls = {s: s.value for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)}
    asked = {s: call.args[0] for s, call in calls.items() if ast.unparse(call.func) == "check" and call.args}
    name = next(map(ast.unparse, asked.values()), entry_point)
    if not name:
        raise RewardError("a test checks a candidate, and names none. Give the record its name as `entry_point`.")
    before = [s for s in statements if s is not check and s not in asked]
    before += _statements(f"{check.args.args[0].arg} = {name}")
    cases: list[Case] = []
    for statement in check.body:
        if isinstance(statement, ast.Assert):
            cases.append(_assertion(before, statement))
            continue
        before = [*before, statement]
        if any(isinstance(inside, ast.Assert) for inside in ast.walk(statement)):
            cases.append(Case({"setup": _text(before), "expression": "True"}, expected=True))
    return cases


def _text(statements: list[ast.stmt]) -> str:
    return "\n".join(ast.unparse(statement) for statement in statements)


def _assertion(before: list[ast.stmt], last: ast.Assert) -> Case:
    """`assert EXPRESSION == LITERAL` keeps the literal outside; of any other assertion the truth is asked."""
    setup, compare = _text(before), last.test
    if isinstance(compare, ast.Compare) and len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
        for asked, known in ((compare.left, compare.comparators[0]), (compare.comparators[0], compare.left)):
            try:
                return Case({"setup": setup, "expression": ast.unparse(asked)}, ast.literal_eval(known))
            except (ValueError, TypeError, SyntaxError):
                continue
    return Case({"setup": setup, "expression": f"bool({ast.unparse(compare)})"}, expected=True)


class Code(Reward):
    """1 when all tests pass (`partial`: the share that does)."""

    def __init__(self, config: CodeReward) -> None:
        limits = Limits(
            config.case_timeout_s, config.timeout_s, config.memory_mb << 20, config.disk_mb << 20,
            config.output_kb << 10, config.processes,
        )  # fmt: skip
        self._config = config
        self._sandbox = Sandbox(limits, isolated=config.sandbox == "bubblewrap")

    async def open(self) -> None:
        self._room = asyncio.Semaphore(self._config.workers)
        await self._sandbox.check()

    async def __call__(self, request: RewardRequest, /) -> float:
        tests = request.extra.get(self._config.tests_key)
        tests = [tests] if isinstance(tests, str) and tests.strip() else tests
        if not isinstance(tests, Sequence) or not tests or isinstance(tests, str):
            raise RewardError(f"the record has no tests under {self._config.tests_key!r}. Give it a list of them.")
        cases = [case for test in tests for case in read_cases(test, request.extra.get("entry_point"))]
        async with self._room:
            try:
                outcomes = await self._sandbox.run(program_in(request.answer), [case.asked for case in cases])
            except RewardError as error:
                if error.code != "timeout":  # which is the program's fault
                    raise
                return 0.0
        passed = sum(case.passed(outcome) for case, outcome in zip(cases, outcomes, strict=False))
        return passed / len(cases) if self._config.partial else float(passed == len(cases))


def _prints(said: str, expected: str) -> bool:
    """Whether the lines are the same, but for space at their ends; a number may be written in another way."""
    ours, theirs = ([_SPACE.split(line.rstrip()) for line in text.rstrip().splitlines()] for text in (said, expected))
    return [len(words) for words in ours] == [len(words) for words in theirs] and all(
        word == wanted or _is_number(word, wanted)
        for words, line in zip(ours, theirs, strict=True)
        for word, wanted in zip(words, line, strict=True)
    )


def _is_number(word: str, wanted: str) -> bool:
    """Whether two words are one number: to TOLERANCE where the expected one has a fraction, else exactly."""
    if not (_NUMBER.fullmatch(word) and (found := _NUMBER.fullmatch(wanted))):
        return False
    ours, theirs = Decimal(word), Decimal(wanted)
    if found["fraction"] is None:
        return ours == theirs
    return abs(ours - theirs) <= TOLERANCE * max(Decimal(1), abs(ours), abs(theirs))
