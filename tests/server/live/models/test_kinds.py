"""Swaps of experts, quantised weights and MLA under traffic, against the answers of fresh stock engines.

Only vLLM's own layers and loaders show that what they make of a checkpoint is swapped as a whole.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loadtest.models.checkpoints import make_adapter, make_checkpoint
from loadtest.models.kinds import KINDS, make_kind
from tests import stock
from tests.cpu import avx512_only, of_kinds
from tests.live import VLLM_ARGS, LiveServer, flags
from tests.server.live.models.test_parts import push, pushed, saved
from tests.waiting import wait_until
from weightsync import Publisher

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]  # servers start in these tests
PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(20 + 17 * i)] for i in range(4)]
TOKENS, LONG, MOST = 24, 400, 900
# oneDNN multiplies fp8 by its reference code on CPUs whose vector units do not know it: 0.2 s a step of this toy.
LONG_OF = {"fp8-online": 60}


def said(live: LiveServer) -> list[list[int]]:
    return [live.generate(prompt, TOKENS)["choices"][0]["token_ids"] for prompt in PROMPTS]


def first_span(answer: dict[str, Any], version: int) -> list[int]:
    """The tokens that `version` wrote, from the beginning of an answer."""
    choice = answer["choices"][0]
    spans = choice["weight_versions"]
    assert spans[0]["version"] == version, spans
    return list(choice["token_ids"][: spans[0]["end"]])


def parts(answer: dict[str, Any], first: int, second: int) -> tuple[list[int], list[int]]:
    """The tokens that each of two versions wrote of an answer."""
    choice = answer["choices"][0]
    assert [span["version"] for span in choice["weight_versions"]] == [first, second], "no stream crossed the swap"
    end = choice["weight_versions"][0]["end"]
    return choice["token_ids"][:end], choice["token_ids"][end:]


def swapped(kind: str, tmp_path: Path, options: dict[str, Any], *, instances: int) -> None:
    """Streams that are open while a version is staged get the old one's tokens, token for token.

    After the flip, the rollback and, of several instances, a rolling swap the answers are a fresh stock engine's.
    """
    paths = [make_kind(tmp_path / str(seed), kind, seed=seed) for seed in (0, 1)]
    expected = [stock.answers(path, PROMPTS, TOKENS, **options) for path in paths]
    assert expected[0] != expected[1], "these weights answer alike: the test would show nothing"
    live = LiveServer(paths[0], tmp_path / "state", (*VLLM_ARGS, *flags(options)), instances=instances)
    with live.running(), ThreadPoolExecutor(len(PROMPTS)) as pool:
        first = live.active()
        assert said(live) == expected[0]
        # MLA's kernels on CPU round by the size of the batch: one stream alone.
        prompts = PROMPTS[:1] if kind.startswith("mla") else PROMPTS
        streams = [pool.submit(live.generate, prompt, LONG_OF.get(kind, LONG)) for prompt in prompts]
        second = live.push(paths[1])
        for index, stream in enumerate(streams):
            tokens = first_span(stream.result(), first)[:TOKENS]
            assert tokens == expected[0][index][: len(tokens)]
        assert said(live) == expected[1]
        assert live.activate(first).status_code == 200
        assert said(live) == expected[0]
        if instances > 1:
            answer = live.admin.post("/admin/weights/activate", json={"version": second, "mode": "rolling"})
            assert answer.status_code == 200, answer.text
            assert said(live) == expected[1]
            wait_until(lambda: live.all_serve(second))  # the gateway sees it a moment later


def test_a_swap_of_two_instances(tmp_path: Path) -> None:
    swapped("moe", tmp_path, KINDS["moe"].vllm, instances=2)


@pytest.mark.broad
@pytest.mark.parametrize(
    "kind",
    [
        *of_kinds(["mla-v3", "gpt-oss", "awq", "gptq", "w4a16", "mixtral", "mla", "fp8-online"]),
        pytest.param("w8a8-kv", marks=avx512_only),
    ],
)
def test_a_swap_of_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    swapped(kind, tmp_path, KINDS[kind].vllm, instances=1)


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_swap_over_two_ranks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallel: each rank builds its slices of a version."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # vLLM on a CPU wants to be told one core for each
    swapped(kind, tmp_path, {"tensor_parallel_size": 2}, instances=1)


@avx512_only
@pytest.mark.broad
def test_what_lies_in_the_cache_is_computed_anew_when_its_scales_change(tmp_path: Path) -> None:
    """Streams cross the commit: they go on as a fresh engine goes on with the tokens so far."""
    paths = [make_kind(tmp_path / str(seed), "w8a8-kv", seed=seed) for seed in (0, 1)]
    options = KINDS["w8a8-kv"].vllm
    live = LiveServer(paths[0], tmp_path / "state", (*VLLM_ARGS, *flags(options)))
    with live.running(), ThreadPoolExecutor(len(PROMPTS)) as pool:
        first = live.active()
        answer = live.admin.post("/admin/weights", json={"path": str(paths[1]), "activate": False})
        second = int(answer.json()["version"])
        streams = [pool.submit(live.generate, prompt, MOST) for prompt in PROMPTS]
        wait_until(lambda: live.engine_metric("vllm:num_requests_running") == len(PROMPTS))
        assert live.activate(second).status_code == 200
        asked = []
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            before, after = parts(stream.result(), first, second)
            asked.append((prompt + before, after[:TOKENS]))
        preempted = live.engine_metric("vllm:num_preemptions_total")
    assert max(stock.behind(paths[1], asked, **options)) < stock.ROUNDING
    assert preempted == len(PROMPTS)


@pytest.mark.broad
@pytest.mark.parametrize("kind", of_kinds(["awq", "fp8-online"]))
def test_base_and_adapter_swap_alone_and_together(kind: str, tmp_path: Path) -> None:
    """An edition answers as the part with its tensors does, beside every base. The base and the adapter are not asked
    in one batch: there stock vLLM answers the base's requests otherwise."""
    bases = [make_kind(tmp_path / f"base-{seed}", kind, seed=seed) for seed in (0, 1)]
    one, two = (make_adapter(tmp_path / f"adapter-{i}", seed=i) for i in (1, 2))
    options = KINDS[kind].vllm
    plain = [stock.answers(base, PROMPTS, TOKENS, **options) for base in bases]
    first, second, last = (
        stock.answers(base, PROMPTS, TOKENS, adapter=adapter, **options)
        for base, adapter in ((bases[0], one), (bases[0], two), (bases[1], two))
    )
    assert len({str(answers) for answers in (*plain, first, second, last)}) == 5, "some of these answer alike"
    live = LiveServer(bases[0], tmp_path / "state", (*VLLM_ARGS, *flags(options), "--enable-lora"))

    def said(model: str) -> list[list[int]]:
        return [live.generate(p, TOKENS, model=model)["choices"][0]["token_ids"] for p in PROMPTS]

    with live.running(), ThreadPoolExecutor(len(PROMPTS)) as pool:
        version = pushed(live, one, "lora/x")
        assert (said("x"), said(live.name)) == (first, plain[0])
        streams = [pool.submit(live.generate, p, LONG_OF.get(kind, LONG), model="x") for p in PROMPTS]
        pushed(live, two, "lora/x")
        for expected, stream in zip(first, streams, strict=True):
            tokens = first_span(stream.result(), version)[:TOKENS]
            assert tokens == expected[: len(tokens)]
        assert (said("x"), said(live.name)) == (second, plain[0])
        with Publisher(live.processes.store, model=live.name) as publisher:
            names = [f"y@{publisher.publish_edition('y', saved(adapter))}" for adapter in (one, two)]
        assert [said(name) for name in names] == [first, second]
        pushed(live, bases[1])
        assert (said("x"), said(names[1]), said(live.name)) == (last, last, plain[1])
        live.rollback()
        assert (said("x"), said(names[0]), said(live.name)) == (second, first, plain[0])


@pytest.mark.broad
def test_an_adapter_of_embedding_and_head_is_served_as_stock_serves_it(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", family="llama", scale=3.0)
    ends = make_adapter(tmp_path / "ends", seed=5, rank=4, ends=True)
    expected = [stock.answers(base, PROMPTS, TOKENS, adapter=adapter) for adapter in (None, ends)]
    assert expected[0] != expected[1]
    other = make_adapter(tmp_path / "other", seed=6, rank=4, ends=True, vocab_size=100)
    live = LiveServer(base, tmp_path / "state", (*VLLM_ARGS, "--enable-lora"))
    with live.running():
        pushed(live, ends, "lora/ends")
        for model, answers in ((None, expected[0]), ("ends", expected[1]), (None, expected[0])):
            more = {"model": model} if model else {}
            assert [live.generate(p, TOKENS, **more)["choices"][0]["token_ids"] for p in PROMPTS] == answers
        refused = push(live, other, "lora/ends").json()["error"]
        assert "has shape [100, 4], the served model has [512, 4]" in refused["message"]
