"""A model that only pools, swapped and rolled back under load: its embeddings are those of fresh stock engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from loadtest.models.checkpoints import write_tokenizer
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


def ranked(url: str, name: str, route: str, texts: list[str]) -> list[float]:
    """Each text's likeness to the first one, as `route` tells it. Raises httpx.HTTPStatusError."""
    pairs = (
        {"text_1": texts[0], "text_2": texts} if route.endswith("score") else {"query": texts[0], "documents": texts}
    )
    answer = httpx.post(f"{url}{route}", json={"model": name} | pairs, timeout=60)
    answer.raise_for_status()
    assert answer.headers["x-hotswap-weight-version"]
    if "data" in answer.json():
        return [row["score"] for row in answer.json()["data"]]
    results = sorted(answer.json()["results"], key=lambda result: result["index"])
    return [result["relevance_score"] for result in results]


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
        texts = ["one", "two and three", "four, five and six"]
        vectors = httpx.post(f"{live.url}/v1/embeddings", json={"model": live.name, "input": texts}).json()["data"]
        cosines = alike([vectors[0]["embedding"]] * 3, [row["embedding"] for row in vectors])
        for route in ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
            assert ranked(live.url, live.name, route, texts) == pytest.approx(cosines, abs=0.01)
        pooled = httpx.post(f"{live.url}/pooling", json={"model": live.name, "input": INPUTS}, timeout=60)
        assert pooled.status_code == 200
        assert httpx.post(f"{live.url}/classify", json={"model": live.name, "input": INPUTS}).status_code == 404
        with load(live) as answers:
            live.push(bases[1])
            assert min(alike(embedded(live.url, live.name), expected[1])) > CLOSE
            live.rollback()
            assert min(alike(embedded(live.url, live.name), expected[0])) > CLOSE
        for answer in answers:  # of one version or of the other, each vector as a whole
            closest = [max(pair) for pair in zip(*(alike(answer, each) for each in expected), strict=True)]
            assert min(closest) > CLOSE


def test_scores_in_sglangs_form_are_those_of_the_head(tmp_path: Path) -> None:
    """A reward model's, as transformers computes them, and not what vLLM makes probabilities of."""
    base, path = make_kind(tmp_path / "base", "dense"), tmp_path / "scorer"
    torch.manual_seed(0)  # of the head
    model = transformers.Qwen2ForSequenceClassification.from_pretrained(
        base, num_labels=2, pad_token_id=0, dtype=torch.float32
    )
    model.save_pretrained(path)
    write_tokenizer(path, model.config.vocab_size)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].tolist() for ids in INPUTS]
    options = ("--max-model-len", "512", "--max-num-seqs", "8", "--runner", "pooling", "--dtype", "float32")
    live = LiveServer(path, tmp_path / "state", options, name="scorer")
    with live.running():
        told = httpx.post(f"{live.url}/classify", json={"input_ids": INPUTS}, timeout=60).json()
        plain = httpx.post(f"{live.url}/classify", json={"input": INPUTS}, timeout=60).json()["data"]
    for scores, each, probabilities in zip(expected, told, plain, strict=True):
        assert each["embedding"] == pytest.approx(scores, abs=1e-3)
        assert each["meta_info"]["weight_version"] == "1"
        assert probabilities["probs"] == pytest.approx(torch.tensor(scores).softmax(0).tolist(), abs=1e-3)
