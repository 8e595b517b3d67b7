"""The class of a mutation, and short names of folders for the lists."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old`, which `file` holds once, becomes `new`. `tests`: what must notice, files or `file::test`. `explained`: why
    nothing can."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    explained: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.old.strip()[:80]!r} -> {self.new.strip()[:80]!r}"


def of(file: str, *tests: str, changes: list[tuple[str, ...]]) -> list[Mutation]:
    """Mutations of one file: (old, new) each, or (old, new, why no test can notice it)."""
    return [Mutation(file, old, new, tests, *why) for old, new, *why in changes]


WS, GW, TR = "tests/weightsync/", "tests/server/gateway/", "tests/trainer/"
ANSWERS, FOLLOW = "tests/server/answers/", "tests/server/follow/"
JOBS = TR + "api/finetuning/"
GATEWAY = "server/gateway/"
ACCESS, QUEUE, FLEET, WIRE = (f"{GATEWAY}{room}/" for room in ("access", "queue", "fleet", "wire"))
