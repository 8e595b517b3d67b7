"""Our losses and gradients are TRL's on the same batch.

TRL's trainers are made without their constructors (which want a model, data and a device) and given log-probs in place
of a model: what is compared is the code of their losses and advantages, in float64.
"""

from __future__ import annotations

import importlib
import types
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.trainer.algorithms import reference as plain
from tests.trainer.algorithms.batches import BATCH, BEHAVIOUR, LONGEST, Trial, preferences, trial
from trainer.algorithms import build_algorithm
from trainer.algorithms.base import OLD_LOGPROBS, REFERENCE_LOGPROBS
from trainer.config import CorrectionConfig, DpoConfig, GrpoConfig, RlooConfig, SftConfig
from trainer.data.records import Record


class Accelerator:
    """One process."""

    device = torch.device("cpu")
    num_processes = 1
    is_main_process = True
    sync_gradients = True
    parallelism_config = None

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Any, reduction: str) -> Any:
        return x


def trainer(kind: str, **attributes: Any) -> Any:
    """A TRL trainer of which only the loss can be asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = object.__new__(getattr(importlib.import_module("trl"), kind))
    made.accelerator = Accelerator()
    made.model = torch.nn.Identity()  # in training
    made._metrics = {"train": defaultdict(list)}
    made.current_gradient_accumulation_steps = 1
    made.aux_loss_enabled = False
    made._total_train_tokens, made._tp_size = 0, 1
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def padded(values: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(values, batch_first=True)


def completions(t: Trial) -> dict[str, torch.Tensor]:
    ids = padded([torch.tensor(s.continuation) for s in t.sequences])
    mask = padded([torch.ones(len(s.continuation), dtype=torch.float64) for s in t.sequences])
    prompts = torch.zeros(len(ids), 1, dtype=torch.int64)
    return {"prompt_ids": prompts, "prompt_mask": prompts + 1, "completion_ids": ids, "completion_mask": mask}


def told_logprobs(t: Trial) -> Any:
    """In place of TRL's pass through a model."""
    logprobs, entropies = padded(t.logprobs), padded(t.entropies)
    return lambda *_, **__: (logprobs, entropies, None)


def grpo_trainer(t: Trial, loss_type: str, level: str, c: GrpoConfig) -> Any:
    high = 1 + c.clip_high if loss_type == "cispo" else c.clip_high
    arguments = types.SimpleNamespace(delta=c.dual_clip, steps_per_generation=1, use_bias_correction_kl=False)
    return trainer(
        "GRPOTrainer",
        args=arguments,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=c.clip_low,
        epsilon_high=high,
        beta=c.kl_coef,
        max_completion_length=LONGEST,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=c.correction.kind != "none",
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=c.entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=c.entropy_coef,
        _get_per_token_logps_and_entropies=told_logprobs(t),
    )


def grpo_inputs(t: Trial, config: GrpoConfig) -> dict[str, torch.Tensor]:
    advantages = plain.grpo_advantages(BATCH, scale=config.scale_rewards)
    inputs = completions(t)
    return inputs | {
        "advantages": torch.tensor(advantages, dtype=torch.float32).double(),
        "old_per_token_logps": padded(t.given[OLD_LOGPROBS] if OLD_LOGPROBS in t.algorithm.needs else BEHAVIOUR),
        "ref_per_token_logps": padded(t.given[REFERENCE_LOGPROBS]),
        "num_items_in_batch": inputs["completion_mask"].sum(),
    }


GRPO: dict[str, tuple[GrpoConfig, str, str]] = {
    "grpo": (GrpoConfig(normalize="sequence", kl_coef=0.1), "grpo", "token"),
    "bnpo": (GrpoConfig(clip_high=0.2), "bnpo", "token"),
    "dr_grpo": (GrpoConfig(normalize="length", scale_rewards=False), "dr_grpo", "token"),
    "dapo": (GrpoConfig(clip_high=0.28, kl_coef=0.1), "dapo", "token"),
    "entropy": (GrpoConfig(entropy_coef=0.3), "dapo", "token"),
    "dual_clip": (GrpoConfig(dual_clip=1.5), "dapo", "token"),
    "gspo": (GrpoConfig(ratio="sequence", normalize="sequence", minibatches=2), "grpo", "sequence"),
    "cispo": (GrpoConfig(objective="cispo", clip_high=0.5), "cispo", "token"),
}


@pytest.mark.parametrize(("config", "loss_type", "level"), GRPO.values(), ids=GRPO)
def test_grpo(config: GrpoConfig, loss_type: str, level: str) -> None:
    t = trial(config)
    t.check(grpo_trainer(t, loss_type, level, config)._compute_loss(None, grpo_inputs(t, config)))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(level: Any) -> None:
    """TRL's token_truncate and sequence_truncate; it does not leave masked tokens out of the denominator, we do."""
    config = GrpoConfig(minibatches=2, correction=CorrectionConfig("truncated", level, 0.0, 2.0))
    t = trial(config)
    inputs = grpo_inputs(t, config)
    old = padded(t.given[OLD_LOGPROBS])
    difference = (old - padded(BEHAVIOUR)) * inputs["completion_mask"]
    whole = difference.sum(-1, keepdim=True) if level == "sequence" else difference
    ratio = {"importance_sampling_ratio": whole.exp().clamp(max=2.0), "old_per_token_logps": old}
    assert (ratio["importance_sampling_ratio"] == 2.0).sum() > 0
    t.check(grpo_trainer(t, "dapo", "token", config)._compute_loss(None, inputs | ratio))


def test_rloo() -> None:
    config = RlooConfig(kl_coef=0.2)
    t = trial(config)
    given = zip(t.given[OLD_LOGPROBS], t.given[REFERENCE_LOGPROBS], strict=True)
    advantages = plain.rloo_advantages(BATCH, [0.2 * (old - ref).sum().item() for old, ref in given])
    theirs = trainer(
        "RLOOTrainer",
        epsilon_low=config.clip_low,
        epsilon_high=config.clip_high,
        _get_per_token_logps_and_entropies=told_logprobs(t),
    )
    inputs = completions(t) | {
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "old_logps": padded(t.given[OLD_LOGPROBS]).sum(-1),
    }
    t.check(theirs._compute_loss(None, inputs), rtol=1e-5, atol=1e-9)


class ToldOutputs:
    """A model that answers with given log-probs [B, T] (of the tokens at t + 1), as TRL's fused output layer does."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        self.logprobs = logprobs

    def __call__(self, labels: torch.Tensor, **_: Any) -> Any:
        label_mask = labels[:, 1:] != -100
        zeros = torch.zeros_like(self.logprobs)
        return types.SimpleNamespace(
            log_probs=self.logprobs * label_mask,
            label_mask=label_mask,
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
        )


DPO = {
    "dpo": DpoConfig(beta=0.4),
    "robust": DpoConfig(loss="robust", label_smoothing=0.2),
    "ipo": DpoConfig(loss="ipo"),
}


@pytest.mark.parametrize("config", DPO.values(), ids=DPO)
def test_dpo(config: DpoConfig) -> None:
    algorithm = build_algorithm(config)
    t = Trial(algorithm, algorithm.sequences(preferences(5, seed=3), []))
    order = [*range(0, 10, 2), *range(1, 10, 2)]  # TRL: all chosen, then all rejected
    rows = [torch.tensor((0, *t.sequences[i].continuation)) for i in order]
    mask = padded([torch.tensor([0] + [1] * (len(row) - 1)) for row in rows])
    theirs = trainer(
        "DPOTrainer",
        args=types.SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        loss_types=[config.loss],
        loss_weights=[1.0],
        use_weighting=False,
    )
    sums = torch.stack([t.given[REFERENCE_LOGPROBS][i].sum() for i in order]).chunk(2)
    inputs = {
        "input_ids": padded(rows),
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": sums[0],
        "ref_rejected_logps": sums[1],
    }
    told = ToldOutputs(padded([t.logprobs[i] for i in order]))
    t.check(theirs._compute_loss(told, inputs, False))


def test_sft() -> None:
    algorithm = build_algorithm(SftConfig())
    records = [Record(0, "", "", (1,), (4, 5)), Record(1, "", "", (6,), (7, 8, 9))]
    t = Trial(algorithm, algorithm.sequences(records, []))
    theirs = trainer(
        "SFTTrainer",
        args=types.SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
    )
    ids = padded([torch.tensor(s.prompt + s.continuation) for s in t.sequences])
    labels = pad_sequence([torch.tensor((-100, *s.continuation)) for s in t.sequences], True, -100)
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    t.check(theirs.compute_loss(ToldOutputs(padded(t.logprobs)), inputs))
