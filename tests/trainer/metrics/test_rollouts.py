"""Reports of rollouts, on groups small enough to count by hand; and rates: lengths without padding, and a model's
operations counted independently."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from tests.trainer.rollouts.trajectories import answer
from trainer.batch import MASK, TOKENS, Sequence, collate
from trainer.megatron.hf_config import ModelShape, load_shape
from trainer.metrics.rollouts import evaluation_metrics, pass_at, rollout_metrics, sample_texts
from trainer.metrics.throughput import Throughput, flops_per_token, lengths, peak_flops, published_peak
from trainer.rewards.scorer import Score
from trainer.tiny_model import write_tiny_model
from trainer.trajectory import Trajectory, TrajectoryGroup, VersionSpan


def sample(*spans: tuple[int, int], finish: str = "stop") -> Trajectory:
    """`spans` are (version, tokens)."""
    versions, start = [], 0
    for version, tokens in spans:
        versions.append(VersionSpan(version, start, start + tokens, step=version))
        start += tokens
    return answer((7,) * start, (-0.5,) * start, finish, tuple(versions))


def score(total: float, **parts: float) -> Score:
    return Score(total, parts)


GROUPS = [
    TrajectoryGroup(
        (1,), (sample((3, 4)), sample((2, 1), (3, 1), finish="length")), (score(1, a=1, b=1), score(0.5, a=0, b=1))
    ),
    TrajectoryGroup((2,), (sample((1, 2)), sample((3, 2))), (score(1, a=1, b=1), score(1, a=1, b=1))),
]


def test_the_first_completion_to_each_prompt_is_shown() -> None:
    """A group of which every episode failed has none."""
    lost = TrajectoryGroup((9,), (), ())
    shown = sample_texts([lost, *GROUPS], 2, lambda ids: ",".join(map(str, ids)))
    assert [s["prompt"] for s in shown] == ["1", "2"]
    assert shown[0] == {
        "prompt": "1", "completion": "7,7,7,7", "finish_reason": "stop", "reward": 1, "rewards": {"a": 1, "b": 1},
        "versions": [3],
    }  # fmt: skip
    assert sample_texts(GROUPS, 1, str) == sample_texts(GROUPS[:1], 5, str)


def test_all_that_is_reported() -> None:
    """Rewards by function and group, lengths, and version lag by token."""
    assert rollout_metrics(GROUPS, step=4) == pytest.approx({
        "reward_mean": 0.875, "reward_std": (3 * 0.125**2 + 0.375**2) ** 0.5 / 2, "reward_min": 0.5, "reward_max": 1,
        "reward/a": 0.75, "reward/b": 1, "full_reward": 0.75, "zero_std_groups": 0.5,
        "answer_tokens_mean": 2.5, "answer_tokens_max": 4, "rollout_tokens": 10, "truncated": 0.25,
        "version_lag_mean": (4 * 1 + 1 * 2 + 1 * 1 + 2 * 3 + 2 * 1) / 10, "version_lag_max": 3,
        "versions_per_sample": 1.25,
    })  # fmt: skip
    assert rollout_metrics([], 3) == {}


def test_an_evaluation_of_greedy_answers() -> None:
    groups = [TrajectoryGroup(g.prompt_ids, g.trajectories[:1], g.scores[:1]) for g in GROUPS]
    found = evaluation_metrics(groups)  # no pass_at
    assert found == {
        "accuracy": 1, "reward_mean": 1, "reward/a": 1, "reward/b": 1,
        "answer_tokens_mean": 3, "answer_tokens_max": 4, "truncated": 0,
    }  # fmt: skip


def test_an_evaluation_of_several_answers_is_their_mean_and_pass_at_k() -> None:
    bad = TrajectoryGroup((3,), (sample((3, 1)), sample((3, 1))), (score(0, a=0, b=0), score(0, a=0, b=0)))
    found = evaluation_metrics([*GROUPS, bad], (1, 2, 3))
    assert found["accuracy"] == found["pass_at_1"] == 0.5
    assert found["pass_at_2"] == pytest.approx(2 / 3)
    assert "pass_at_3" not in found  # no prompt has three answers with a score


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_have_a_right_one(k: int, right: int) -> None:
    """Chen et al. 2021, equation 1, against counting."""
    answers = [True] * right + [False] * (5 - right)
    choices = list(itertools.combinations(answers, k))
    assert pass_at(k, 5, right) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_a_reward_that_failed_is_no_full_reward() -> None:
    failed = Score(1.0, {"a": 1.0}, {"a": "timed out"})
    found = evaluation_metrics([TrajectoryGroup((1,), (sample((1, 1)),), (failed,))])
    assert found["accuracy"] == 0
    assert found["reward/a"] == 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(path, "llama", num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def shape(llama: Path) -> ModelShape:
    return load_shape(llama)


def test_lengths_are_those_of_sequences() -> None:
    """In padded rows, in rows that only fill up, and in packed rows by segment."""
    sequences = [Sequence((1, 2), (3, 4, 5)), Sequence((1,), (2,)), Sequence((1, 2, 3), (4,), train_on_prompt=True)]
    assert lengths(collate(sequences)).tolist() == [5, 2, 4]
    filled = {name: torch.cat([t, torch.zeros_like(t)]) for name, t in collate(sequences).items()}
    assert lengths(filled).tolist() == [5, 2, 4]
    segments = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    fields = {TOKENS: torch.ones_like(segments), MASK: torch.ones(3, 5), "segments": segments}
    assert lengths(fields).tolist() == [3, 2, 1]


@pytest.mark.parametrize("frozen", [False, True])
def test_operations_are_those_of_the_models_matrix_products(llama: Path, shape: ModelShape, frozen: bool) -> None:
    """Counted by torch on transformers' model: 2 operations a multiply-add forward, three times that with backward. For
    frozen weights there are no gradients of their own, only those of what goes through them."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    length = 24
    model = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager").requires_grad_(not frozen)
    inputs = torch.zeros(1, length, shape.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=inputs).logits.sum().backward()
    ours = flops_per_token(shape, length, frozen=frozen) * length
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.03)  # norms count in N, and are no products


def test_tied_embeddings_count_once_as_the_output_layer(shape: ModelShape) -> None:
    tied = dataclasses.replace(shape, tied=True)
    assert tied.parameters == shape.parameters - shape.vocab * shape.hidden
    assert flops_per_token(tied, 10) == flops_per_token(shape, 10)


def test_experts_that_a_token_does_not_take_do_not_count(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "mixtral", num_hidden_layers=2)
    mixture = load_shape(tmp_path)
    assert mixture.experts > mixture.experts_per_token > 0
    taken = dataclasses.replace(mixture, experts=mixture.experts_per_token)
    routers = 6 * mixture.layers * mixture.hidden * (mixture.experts - taken.experts)
    assert flops_per_token(mixture, 10) == flops_per_token(taken, 10) + routers


def test_utilisation_is_operations_by_time_ranks_and_peak(shape: ModelShape) -> None:
    fields = collate([Sequence((1, 2), (3, 4))] * 5)
    found = Throughput(shape, ranks=2, peak=1e12).metrics(fields, train_ms=100.0)
    assert found["train_tokens_per_s"] == 200
    per_s = flops_per_token(shape, 4) * 20 / 0.1
    assert found["mfu"] == pytest.approx(per_s / 2 / 1e12)
    assert found["train_tflops"] == pytest.approx(per_s / 2 / 1e12)
    twice = Throughput(shape, ranks=2, peak=1e12).metrics(fields, train_ms=100.0, passes=2)
    assert twice["mfu"] == pytest.approx(2 * found["mfu"])
    empty = {TOKENS: torch.zeros(2, 4, dtype=torch.int64), MASK: torch.zeros(2, 3)}
    assert Throughput(shape, 1, 1e12).metrics(empty, 10.0) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
    ],
)
def test_a_gpu_is_not_taken_for_one_whose_name_begins_alike(name: str, peak: float | None) -> None:
    assert published_peak(name) == peak


def test_a_peak_is_found_for_this_machine() -> None:
    assert 1e9 < peak_flops() < 1e16
    assert peak_flops() == peak_flops()
