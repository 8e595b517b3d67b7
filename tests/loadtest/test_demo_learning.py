"""The demo's recipe end to end: real Megatron trains, real vLLM serves, and a client streams all the way through."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loadtest.demo import Demo, DemoFailed, Recipe, Scene
from loadtest.demo.recipe import ENVIRONMENT, MODEL
from tests.waiting import wait_until
from trainer.config import ArithmeticData, strict
from trainer.data.problems import Arithmetic
from trainer.data.tokenizer import Tokenizer

STARTS = ("server.gateway", "server.cli instance", "trainer.main", "weightsync.push", "weightsync.persist")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.broad, pytest.mark.timeout(900)]
RECIPE = Recipe(seed=1, sft_steps=150, grpo_steps=30)
LEAST_GAIN = 20.0  # points of held-out accuracy


@dataclass
class Outcome:
    """A finished run whose server still answers."""

    demo: Demo
    scene: Scene
    served: dict[str, str] = field(default_factory=dict)  # greedy answer of the server by held-out prompt


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        scene = Scene()
        demo = Demo(tmp_path_factory.mktemp("demo"), RECIPE, scene)
        try:
            demo.run()
            assert demo.server is not None
            prompts = [question.prompt for question in RECIPE.questions(demo.run_dir, RECIPE.held_out)]
            yield Outcome(demo, scene, ask(demo.server.url, prompts))
        finally:
            demo.close()


def ask(url: str, prompts: list[str]) -> dict[str, str]:
    """Greedy answers through vLLM's own OpenAI route."""
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    return {prompts[choice["index"]]: choice["text"] for choice in answer["choices"]}


def test_grpo_alone_raises_held_out_accuracy(outcome: Outcome) -> None:
    questions = RECIPE.questions(outcome.demo.run_dir, RECIPE.held_out)
    right = sum(outcome.served[question.prompt] == question.answer for question in questions)
    fine_tuned = outcome.scene.accuracy["fine-tuned"]
    assert 100 * (right / len(questions) - fine_tuned) >= LEAST_GAIN, (right, outcome.scene.accuracy)
    assert outcome.scene.gain >= LEAST_GAIN
    assert outcome.scene.accuracy["start"] < 0.1


def test_held_out_problems_are_not_trained_on(outcome: Outcome) -> None:
    directory = outcome.demo.run_dir
    section = strict.build(ArithmeticData, RECIPE.grpo(directory, "http://unused")["data"])
    data = Arithmetic(section, Tokenizer(directory / "model"), RECIPE.seed)
    trained = {data[i].prompt for i in range(len(data))}
    assert len(outcome.served) == RECIPE.held_out
    assert not trained & set(outcome.served)


def test_every_step_of_grpo_was_a_new_version_and_every_version_was_swapped_in(outcome: Outcome) -> None:
    published = outcome.scene.published[-RECIPE.grpo_steps :]
    assert published == list(range(published[0], published[0] + RECIPE.grpo_steps))
    swaps = outcome.scene.swaps
    assert not swaps.aborted
    assert [swap.epoch for swap in swaps.done] == list(range(swaps.done[0].epoch, swaps.done[-1].epoch + 1))
    assert set(published) <= {swap.version for swap in swaps.done}
    assert swaps.done[-1].version == published[-1]


def test_the_streaming_client_lost_nothing(outcome: Outcome) -> None:
    client = outcome.scene.client
    assert client.lost == 0, client.first_problem
    assert client.answers > RECIPE.grpo_steps
    assert client.crossed > 0
    assert outcome.scene.published[-1] in client.versions
    assert len(client.versions) > RECIPE.grpo_steps // 2


def test_the_exported_checkpoint_is_what_is_served(outcome: Outcome) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = outcome.demo.run_dir / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
    prompts = list(outcome.served)
    ids = torch.tensor([tokenizer(prompt)["input_ids"] for prompt in prompts])
    with torch.no_grad():
        out = model.generate(ids, do_sample=False, max_new_tokens=4)
    answers = [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in out]
    assert dict(zip(prompts, answers, strict=True)) == outcome.served


def test_a_trainer_that_fails_is_reported_with_its_own_words(outcome: Outcome) -> None:
    class Broken(Recipe):
        def grpo(self, run: Path, url: str) -> dict[str, Any]:
            return super().grpo(run, url) | {"learning_rate": 1.0}

    demo, recipe = outcome.demo, outcome.demo.recipe
    demo.recipe = Broken(**vars(replace(recipe)))
    try:
        with pytest.raises(DemoFailed, match=r"(?s)phase 'improve'.*ended with 2.*learning_rate: unknown key"):
            demo.train("improve", "grpo")
    finally:
        demo.recipe = recipe


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    before = set(Path("/dev/shm").glob(f"hotswap-{MODEL}-*"))
    command = [sys.executable, "-m", "loadtest.demo", "--dir", str(tmp_path), "--no-keep"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        wait_until(lambda: (tmp_path / "state/logs/instance-0.log").exists(), 120, process=process)
        wait_until(lambda: len(psutil.Process(process.pid).children()) >= 2, 120, process=process)
        children = psutil.Process(process.pid).children(recursive=True)
        arenas = set(Path("/dev/shm").glob(f"hotswap-{MODEL}-*")) - before
        assert arenas
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert "interrupted" in said
        assert not [path for path in arenas if path.exists()]
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    finally:
        process.kill()
        process.wait()
