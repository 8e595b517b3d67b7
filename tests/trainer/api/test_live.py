"""The examples of docs/trainer/api.md and jobs.md, as they stand there, against `hotswap up` with a real engine and
real keys; and clients that train all weights of what it serves."""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.trainer.api.server import ApiServer, datum, learn, sums
from tests.trainer.api.server import live as running
from tests.trainer.test_mixture import ENGINE
from tests.waiting import wait_until
from trainer.tiny_model import write_tiny_model

PAGES = Path(__file__).parents[3] / "docs" / "trainer"
pytestmark = [pytest.mark.engine, pytest.mark.broad, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiServer, str]]:
    """The training API, and a key for it."""
    root = tmp_path_factory.mktemp("live")
    write_tiny_model(root / "model", max_position_embeddings=1024)
    flags = (*ENGINE, "--enable-lora", "--max-lora-rank", "16")
    with running(root, root / "model", flags, limits={"served": 3}) as (_, api, key):
        yield api, key


def run_example(page: str) -> dict[str, Any]:
    """The values of the example's names in the end."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    said: dict[str, Any] = {}
    exec(compile(code, page, "exec"), said)
    return said


def test_the_example_of_the_page(live: tuple[ApiServer, str], monkeypatch: pytest.MonkeyPatch) -> None:
    api, key = live
    monkeypatch.setenv("TINKER_BASE_URL", api.url)
    monkeypatch.setenv("TINKER_API_KEY", key)
    said = run_example("api.md")
    losses, rewards = said["losses"], said["rewards"]
    assert losses[-1] < 0.7 * losses[0]
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:3]) + 0.1, rewards
    assert said["tokenizer"].decode(said["answer"].sequences[0].tokens) == "4"


def test_the_example_of_fine_tuning_jobs(live: tuple[ApiServer, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model answers by name, whole and in a stream, and its checkpoints are other models."""
    api, key = live
    monkeypatch.setenv("OPENAI_BASE_URL", f"{api.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", key.removeprefix("tml-"))
    said = run_example("jobs.md")
    assert said["answer"].choices[0].message.content == "4"
    assert said["answer"].model == said["job"].fine_tuned_model
    assert len(said["metrics"].splitlines()) == 1 + 150
    client = said["client"]
    (*_, first) = client.fine_tuning.jobs.checkpoints.list(said["job"].id)
    names = [said["job"].fine_tuned_model, first.fine_tuned_model_checkpoint, "demo"]
    asked: dict[str, Any] = {"prompt": "3+4=", "max_tokens": 1, "temperature": 0, "logprobs": 1}
    logprobs = {}
    for name in names:
        (choice,) = client.completions.create(model=name, **asked).choices
        (event, *_) = [e for e in client.completions.create(model=name, stream=True, **asked) if e.choices]
        assert (event.choices[0].text, event.model) == (choice.text, name)
        logprobs[name] = choice.logprobs.top_logprobs[0]
    assert len({str(found) for found in logprobs.values()}) == 3
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=names[0], prompt="1", max_tokens=-1)
    stranger = openai.OpenAI(api_key="hs-nobody")
    with pytest.raises(openai.AuthenticationError, match="does not take this key"):
        stranger.files.list()


def test_what_is_sampled_is_what_was_trained(live: tuple[ApiServer, str]) -> None:
    """Samplers of several moments, more of them than the server has names: the log-probs of each are those that the
    trainer had then, token by token; and ppo with them has a ratio of one."""
    api, key = live
    service = api.service(key)
    client = service.create_lora_training_client(base_model="demo", rank=8).result()
    probe, then, samplers = [4, 13, 5, 14, 6, 3, 9], [], []
    for _ in range(5):
        client.forward_backward(sums(), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        output = client.forward([datum(probe)], "cross_entropy").result()
        then.append(list(output.loss_fn_outputs[0]["logprobs"].data))
        samplers.append(client.save_weights_and_get_sampling_client().result())
    for sampler, expected in list(zip(samplers, then, strict=True))[-3:] * 2:
        found = sampler.compute_logprobs(types.ModelInput.from_ints(probe)).result()
        assert found[0] is None
        assert found[1:] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="no longer kept"):
        samplers[0].compute_logprobs(types.ModelInput.from_ints(probe)).result()
    prompt = types.ModelInput.from_ints([4, 13, 5, 14])
    (sample,) = samplers[-1].sample(prompt, 1, types.SamplingParams(max_tokens=4, stop=[])).result().sequences
    assert len(sample.tokens) == 4
    advantages = [0.0] * 3 + [1.0] * 4
    data = [datum([4, 13, 5, 14, *sample.tokens], logprobs=[0.0] * 3 + list(sample.logprobs), advantages=advantages)]
    assert client.forward_backward(data, "ppo").result().metrics["loss:sum"] == pytest.approx(-4.0, abs=1e-3)
    last = samplers[-1].sample(
        types.ModelInput.from_ints(probe), 1, types.SamplingParams(max_tokens=1), True, 2, prompt_logprobs_last_n=2
    )
    answer = last.result()
    assert (answer.prompt_logprobs or [])[:5] == [None] * 5
    assert len((answer.topk_prompt_logprobs or [])[-1] or []) == 2


def test_a_key_that_the_gateway_does_not_know(live: tuple[ApiServer, str]) -> None:
    api, _ = live
    with pytest.raises(tinker.AuthenticationError, match="does not take this key"):
        api.service("tml-hs-nobody").create_lora_training_client(base_model="demo").result()


class Streams:
    """Answers that clients of the server stream, one after the other: the spans of each, and what went wrong."""

    def __init__(self, url: str, key: str) -> None:
        self.spans: list[list[dict[str, int]]] = []
        self.faults: list[Any] = []
        self._url, self._headers, self._stop = url, {"authorization": f"Bearer {key}"}, threading.Event()

    @contextlib.contextmanager
    def running(self, count: int = 3) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)

    def _run(self) -> None:
        body = {"prompt_token_ids": [5, 6, 7], "max_tokens": 240, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=120) as http:
            while not self._stop.is_set() and not self.faults:
                try:
                    with http.stream("POST", "/generate", json=body) as answer:
                        answer.raise_for_status()
                        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if "data: " in line]
                    (choice,) = orjson.loads(lines[-1])["choices"]
                    assert choice["weight_versions"][-1]["end"] == body["max_tokens"]
                    self.spans.append(choice["weight_versions"])
                except Exception as error:
                    self.faults.append(error)


def greedy(path: Path, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """By transformers: the likeliest tokens behind the prompt, and their log-probs."""
    network, ids = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), list(prompt)
    logprobs = []
    for _ in range(tokens):
        with torch.no_grad():
            best = network(torch.tensor([ids])).logits[0, -1].log_softmax(-1).max(-1)
        ids.append(int(best.indices))
        logprobs.append(float(best.values))
    return ids[len(prompt) :], logprobs


def test_all_weights_are_a_version_of_the_server_while_it_streams(tmp_path: Path) -> None:
    """Sampled tokens are those of the checkpoint that was saved; streams go on over each swap."""
    model, prompt, tokens = tmp_path / "model", [4, 13, 5, 14], 8
    write_tiny_model(model, max_position_embeddings=1024)
    params = types.SamplingParams(max_tokens=tokens, temperature=0.0, stop=[])
    with running(tmp_path, model, ENGINE, full=True) as (server, api, key):
        streams = Streams(server.url, key.removeprefix("tml-"))
        with streams.running():
            service = api.service(key)
            client = service.create_lora_training_client(base_model="demo", rank=0).result()
            begun = server.active()
            losses = learn(client, sums(), 8)
            assert losses[-1] < losses[0]
            assert server.active() == begun, "nothing is served before it is saved"
            path = client.save_weights_for_sampler("eight").result().path
            (saved,) = (tmp_path / "api" / "models" / client.model_id / "sampler_weights").iterdir()
            trained = service.create_sampling_client(model_path=path).result()
            base = service.create_sampling_client(base_model="demo").result()
            versions, found = [begun], []
            for sampler, file in ((trained, saved), (base, model), (trained, saved)):
                (sample,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences
                found.append(list(sample.tokens))
                expected, logprobs = greedy(file, prompt, len(sample.tokens))
                assert list(sample.tokens) == expected
                assert list(sample.logprobs or []) == pytest.approx(logprobs, abs=1e-4)
                versions.append(server.active())

                def over_the_swap(crossed: tuple[int, ...] = tuple(versions[-2:])) -> bool:
                    said = [tuple(span["version"] for span in spans) for spans in streams.spans]
                    return bool(streams.faults) or crossed in said

                wait_until(over_the_swap, 120, what=lambda: f"no stream of {len(streams.spans)} is of two versions")
    assert streams.faults == []
    assert versions == sorted(set(versions)), "each is a new version"
    assert found[0] == found[2] != found[1]
