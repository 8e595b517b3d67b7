"""The losses once more, written from the papers' formulas one token at a time, in float64. Slow and plain on purpose:
nothing here is shared with trainer/algorithms."""

from __future__ import annotations

import math
from statistics import fmean as mean
from statistics import pstdev, stdev
from typing import Any

import torch

from trainer.trajectory import TrajectoryGroup

Numbers = list[torch.Tensor]


def grpo_advantages(batch: list[TrajectoryGroup], *, scale: bool) -> list[float]:
    """One for each sample."""
    result = []
    for group in batch:
        rewards = [score.total for score in group.scores]
        result += [(r - mean(rewards)) / (stdev(rewards) + 1e-4 if scale else 1.0) for r in rewards]
    return result


def rloo_advantages(batch: list[TrajectoryGroup], penalties: list[float]) -> list[float]:
    """Reward less penalty, against the mean of the group's others."""
    result, first = [], 0
    for group in batch:
        r = [s.total - penalties[first + i] for i, s in enumerate(group.scores)]
        first += len(r)
        result += [x - mean(r[:i] + r[i + 1 :]) for i, x in enumerate(r)]
    return result


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Straight from the definition: a double sum."""
    n = len(rewards)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def normalize(advantages: list[list[float]]) -> list[list[float]]:
    """By the mean and (biased) standard deviation of all tokens."""
    flat = [a for row in advantages for a in row]
    return [[(a - mean(flat)) / pstdev(flat) for a in row] for row in advantages]


def correction_weights(
    c: dict[str, Any], old: Numbers, behaviour: list[tuple[float, ...]], lags: list[list[float]]
) -> tuple[list[list[float]], list[list[bool]]]:
    """(weight, kept) of every token, after CorrectionConfig's documentation."""
    weights, kept = [], []
    for o, b, lag in zip(old, behaviour, lags, strict=True):
        logs = [x - y for x, y in zip(o.tolist(), b, strict=True)]
        if c["level"] == "sequence":
            logs, lag = [sum(logs)] * len(logs), [max(lag)] * len(lag)
        if c["level"] == "geometric":
            logs, lag = [mean(logs)] * len(logs), [max(lag)] * len(lag)
        w = [math.exp(x) for x in logs]
        keep = [True] * len(w)
        if c["kind"] == "none":
            w = [1.0] * len(w)
        if c["kind"] == "truncated":
            w = [min(max(x, c["low"]), c["high"]) for x in w]
        if c["kind"] == "masked":
            keep = [c["low"] <= x <= c["high"] for x in w]
        if c["max_lag"] is not None:
            keep = [k and age <= c["max_lag"] for k, age in zip(keep, lag, strict=True)]
        weights.append([x * c["lag_decay"] ** age for x, age in zip(w, lag, strict=True)])
        kept.append(keep)
    return weights, kept


def policy_loss(
    c: dict[str, Any],
    logprobs: Numbers,
    proximal: Numbers,
    advantages: list[list[float]],
    *,
    weights: list[list[float]] | None = None,
    kept: list[list[bool]] | None = None,
    reference: Numbers | None = None,
    behaviour: Numbers | None = None,
    logits: Numbers | None = None,
    max_tokens: int = 6,
) -> torch.Tensor:
    """`c` are the fields of a PolicyConfig. `reference`: for KL in the loss, weighted
    by the ratio to `behaviour` if that is given; `logits` [tokens, V]: for the entropy."""
    by_answer: list[list[torch.Tensor]] = []
    for i, (new, prox) in enumerate(zip(logprobs, proximal, strict=True)):
        difference = [new[t] - prox[t] for t in range(len(new))]
        whole = torch.stack(difference).sum()
        terms = []
        for t in range(len(new)):
            log_ratio = {"token": difference[t], "sequence": whole / len(new), "trajectory": whole}[c["ratio"]]
            ratio, a = torch.exp(log_ratio), advantages[i][t]
            if c["objective"] == "cispo":
                term = -min(ratio.item(), 1 + c["clip_high"]) * a * new[t]
            else:
                surrogate = torch.minimum(ratio * a, torch.clamp(ratio, 1 - c["clip_low"], 1 + c["clip_high"]) * a)
                if c["dual_clip"] is not None and a < 0:
                    surrogate = torch.maximum(surrogate, torch.tensor(c["dual_clip"] * a, dtype=torch.float64))
                term = -surrogate
            term = term * (weights[i][t] if weights else 1.0)
            if reference is not None:
                d = reference[i][t] - new[t]
                sampled = torch.exp(new[t] - behaviour[i][t]) if behaviour else 1.0
                term = term + c["kl_coef"] * sampled * (torch.exp(d) - d - 1)
            if logits is not None:
                p = torch.exp(logits[i][t]) / torch.exp(logits[i][t]).sum()
                term = term + c["entropy_coef"] * sum(q * torch.log(q) for q in p)
            if kept is None or kept[i][t]:
                terms.append(term)
        if terms:
            by_answer.append(terms)
    if c["normalize"] == "token":
        everything = [term for terms in by_answer for term in terms]
        return torch.stack(everything).sum() / len(everything)
    lengths = [len(terms) if c["normalize"] == "sequence" else max_tokens for terms in by_answer]
    sums = [torch.stack(terms).sum() / n for terms, n in zip(by_answer, lengths, strict=True)]
    return torch.stack(sums).sum() / len(sums)


def value_loss(values: Numbers, old: Numbers, returns: list[list[float]], clip: float | None) -> torch.Tensor:
    """Half the squared error, the larger of plain and clipped, over all tokens."""
    terms = []
    for v, o, r in zip(values, old, returns, strict=True):
        for t in range(len(v)):
            error = (v[t] - r[t]) ** 2
            if clip is not None:
                near = o[t] + torch.clamp(v[t] - o[t], -clip, clip)
                error = torch.maximum(error, (near - r[t]) ** 2)
            terms.append(error / 2)
    return torch.stack(terms).sum() / len(terms)


def dpo_loss(kind: str, beta: float, smoothing: float, logprobs: Numbers, reference: Numbers) -> torch.Tensor:
    """Pairs are (chosen, rejected), one after the other."""
    terms = []
    for i in range(0, len(logprobs), 2):
        chosen, rejected = logprobs[i] - reference[i], logprobs[i + 1] - reference[i + 1]
        if kind == "ipo":
            terms.append((chosen.mean() - rejected.mean() - 1 / (2 * beta)) ** 2)
            continue
        d = beta * (chosen.sum() - rejected.sum())
        right, wrong = -torch.log(1 / (1 + torch.exp(-d))), -torch.log(1 / (1 + torch.exp(d)))
        if kind == "robust":
            terms.append(((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing))
        else:
            terms.append((1 - smoothing) * right + smoothing * wrong)
    return torch.stack(terms).mean()
