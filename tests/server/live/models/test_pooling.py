"""A model that only pools, swapped and rolled back under load: its embeddings are those of fresh stock engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from loadtest.models.kinds import make_kind
from tests import stock
from tests.live import LiveServer

pytestmark = [pytest.mark.engine, pytest.mark.broad]
INPUTS = [[(11 * i + 5 * j) % 500 + 3 for j in range(9 + 14 * i)] for i in range(3)]
CLOSE, FAR = 0.999, 0.9  # cosines: bf16 kernels round by the shape of a batch, and other weights are far off


def embedded(url: str, name: str) -> list[list[float]]:
    """All inputs in one request. Raises httpx.HTTPStatusError."""
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": name, "input": INPUTS}, timeout=60)
    answer.raise_for_status()
    return [row["embedding"] for row in answer.json()["data"]]


def alike(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    return torch.cosine_similarity(torch.tensor(ours), torch.tensor(theirs)).tolist()


@contextmanager
def load(live: LiveServer) -> Iterator[list[list[list[float]]]]:
    """Asks again and again; yields what was answered."""
    answers: list[list[list[float]]] = []
    failed: list[Exception] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                answers.append(embedded(live.url, live.name))
            except httpx.HTTPError as error:
                failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert not failed


def test_embeddings_are_those_of_the_version_that_serves(tmp_path: Path) -> None:
    bases = [make_kind(tmp_path / str(seed), "llama", seed=seed) for seed in (0, 1)]
    expected = [stock.embeddings(base, INPUTS) for base in bases]
    assert max(alike(*expected)) < FAR
    options = ("--max-model-len", "512", "--max-num-seqs", "8", "--runner", "pooling")
    live = LiveServer(bases[0], tmp_path / "state", options, name="embedder", instances=2)
    with live.running():
        assert min(alike(embedded(live.url, live.name), expected[0])) > CLOSE
        with load(live) as answers:
            live.push(bases[1])
            assert min(alike(embedded(live.url, live.name), expected[1])) > CLOSE
            live.rollback()
            assert min(alike(embedded(live.url, live.name), expected[0])) > CLOSE
        for answer in answers:  # of one version or of the other, each vector as a whole
            closest = [max(pair) for pair in zip(*(alike(answer, each) for each in expected), strict=True)]
            assert min(closest) > CLOSE
