"""The simulation of what gateways know of prefix caches: the more they know, the more they hit."""

from __future__ import annotations

from pathlib import Path

import orjson

from loadtest.gateway.prefix_knowledge import GATEWAYS, Engine, chain, run


def test_more_knowledge_hits_more(tmp_path: Path) -> None:
    rows = run(tmp_path / "figures.json", small=True)
    assert rows == orjson.loads((tmp_path / "figures.json").read_bytes())
    assert [(row["gateways"], row["stays"]) for row in rows] == list(GATEWAYS)
    for row in rows:
        for way in ("own", "reports"):
            assert row["load"]["hits"] < row[way]["hits"] < row["events"]["hits"] < 1
    assert rows[-1]["own"]["hits"] < rows[-1]["reports"]["hits"], "who sent what is of no account"
    assert rows[0]["own"] == rows[0]["all"]  # one gateway has sent all there is


def test_an_engine_drops_the_end_of_a_prompt_first() -> None:
    engine = Engine(0, capacity=3, running=[0])
    prompt = chain(bytes(4 * 64))
    engine.use(prompt)
    assert engine.held(prompt) == 3
    other = chain(b"x" * 128)
    engine.use(other)
    assert (engine.held(other), engine.held(prompt)) == (2, 1)
