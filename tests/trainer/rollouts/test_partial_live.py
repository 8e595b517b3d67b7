"""A partial rollout across a swap of a real engine: what each token was sampled from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.live import LiveServer
from tests.trainer.rollouts.client import client, records
from tests.waiting import wait_until
from trainer.data.tokenizer import Tokenizer
from trainer.tiny_model import write_tiny_model
from trainer.trajectory import Partial, Trajectory, TrajectoryGroup

PATIENCE_S = 120
BUDGET, ROUNDS = 8, 3
SAMPLES = 48  # of which the random weights end one in sixteen at each token


@pytest.mark.broad
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("quiet_engines")
def test_every_token_comes_from_the_weights_that_served_in_its_round(tmp_path: Path) -> None:
    """Three rounds under three versions. The log-probs that were kept are those of each version's own weights, given
    all the tokens before."""
    weights = [tmp_path / f"weights-{number}" for number in range(ROUNDS)]
    for seed, directory in enumerate(weights):
        write_tiny_model(directory, seed=seed, max_position_embeddings=1024)
    tokenizer = Tokenizer(weights[0])
    (record,) = records(tokenizer, "1+2=")
    live = LiveServer(weights[0], tmp_path / "state", ("--dtype", "float32", "--max-model-len", "256"))
    versions = [1]
    with live.running(), client(live.url, tokenizer, max_tokens=BUDGET * ROUNDS, token_budget=BUDGET) as running:
        going = running.round(record, SAMPLES, 0)
        for directory in weights[1:]:
            assert isinstance(going.result(PATIENCE_S), Partial)
            versions.append(live.push(directory))
            wait_until(lambda: writes(live) == versions[-1], what="the instance flips")
            going = running.round(record, SAMPLES, 0, going)
        group = going.result(PATIENCE_S)
    assert isinstance(group, TrajectoryGroup)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in weights]
    lengths = [len(trajectory.token_ids) for trajectory in group.trajectories]
    assert max(lengths) > (ROUNDS - 1) * BUDGET, "none went through all rounds"
    for trajectory in group.trajectories:
        ends = [*range(BUDGET, len(trajectory.token_ids), BUDGET), len(trajectory.token_ids)]
        written = enumerate(zip(versions, ends, strict=False))
        spans = [(version, place * BUDGET, end) for place, (version, end) in written]
        assert [(span.version, span.start, span.end) for span in trajectory.versions] == spans
        for (_, start, end), model in zip(spans, models, strict=False):
            expected = logprobs(model, group.prompt_ids, trajectory)[start:end]
            assert trajectory.logprobs[start:end] == pytest.approx(expected, abs=1e-3)
    long = max(group.trajectories, key=lambda trajectory: len(trajectory.token_ids))
    wrong = logprobs(models[0], group.prompt_ids, long)[BUDGET:]
    assert max(abs(a - b) for a, b in zip(long.logprobs[BUDGET:], wrong, strict=True)) > 0.1, "versions are alike"


def writes(live: LiveServer) -> int:
    """The version that answers now."""
    return int(live.generate([5], 1)["choices"][0]["weight_versions"][-1]["version"])


def logprobs(model: AutoModelForCausalLM, prompt: tuple[int, ...], trajectory: Trajectory) -> list[float]:
    """Of the trajectory's tokens under a model's weights."""
    tokens = torch.tensor([[*prompt, *trajectory.token_ids]])
    with torch.no_grad():
        found = torch.log_softmax(model(tokens).logits[0, len(prompt) - 1 : -1], dim=-1)
    values: list[float] = found.gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()
    return values
