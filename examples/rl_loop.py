"""Reinforcement learning on a server that answers all the while: sample, reward, learn, publish.

    hotswap up MODEL_DIR --name demo            # in another terminal
    python examples/rl_loop.py MODEL_DIR --model demo

It is GRPO of sums, in one process beside the server: a group of answers to each question, advantages within the group,
PPO's clipped ratio against the log-probabilities that the server has given. Replace `questions` and `reward` by yours.

Three things are the server's part:

    logprobs            of each sampled token, as the version that wrote it computed them: the ratio of a token is right
                        whichever version that was
    weight_versions     the version of each span of tokens. An answer that a swap crossed has two
    x-hotswap-min-version  a request that must be answered by the weights just published, or newer ones, says so

`Publisher.publish` returns when the version serves. Clients of the server stream on meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from weightsync import Publisher

CLIP = 0.2
WAIT_S = 30  # for an instance that serves the version just published


@dataclass
class Answer:
    """One sampled answer. `versions` is of the weights that wrote each token."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float
    advantage: float = 0.0


def questions(count: int, chance: random.Random) -> list[tuple[str, str]]:
    """Sums of two digits, and their results."""
    pairs = [(chance.randint(0, 9), chance.randint(0, 9)) for _ in range(count)]
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def reward(answer: str, right: str) -> float:
    """1 for the right result, and up to 0.1 for digits, so that there is something to learn from the first step on."""
    digits = sum(c.isdigit() for c in answer) / max(len(answer), 1)
    return float(answer.strip().startswith(right)) + 0.1 * digits


async def sample(client: httpx.AsyncClient, args: argparse.Namespace, tokenizer: Any, step: int) -> list[list[Answer]]:
    """A group of answers to each question, all asked at once."""
    asked = questions(args.questions, random.Random(f"{args.seed}/{step}"))  # noqa: S311 - no secret

    async def group(question: str, right: str) -> list[Answer]:
        prompt_ids = tokenizer(question)["input_ids"]
        body = {"model": args.model, "prompt_token_ids": prompt_ids, "n": args.group, "max_tokens": args.max_tokens}
        answer = await client.post("/generate", json=body | {"logprobs": True, "stream": False})
        answer.raise_for_status()
        return [
            Answer(
                prompt_ids,
                choice["token_ids"],
                choice["logprobs"],
                [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])],
                reward(choice["text"], right),
            )
            for choice in answer.json()["choices"]
        ]

    return await asyncio.gather(*(group(question, right) for question, right in asked))


def judge(groups: Sequence[Sequence[Answer]]) -> list[Answer]:
    """Every answer with its advantage: how much better its reward is than its group's, in standard deviations."""
    for group in groups:
        mean = statistics.fmean(answer.reward for answer in group)
        spread = statistics.pstdev(answer.reward for answer in group)
        for answer in group:
            answer.advantage = (answer.reward - mean) / (spread + 1e-6)
    return [answer for answer in itertools.chain.from_iterable(groups) if answer.token_ids]


def loss_of(model: Any, answers: Sequence[Answer]) -> torch.Tensor:
    """PPO's clipped loss over the tokens of the answers: a scalar."""
    rows = [answer.prompt_ids + answer.token_ids for answer in answers]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    logprobs, advantages, learned = (torch.zeros(len(rows), width) for _ in range(3))
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        own = slice(len(answer.prompt_ids), len(row))
        ids[i, : len(row)] = torch.tensor(row)
        logprobs[i, own] = torch.tensor(answer.logprobs)
        advantages[i, own], learned[i, own] = answer.advantage, 1.0
    mask = (torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]).long()
    device = model.device
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, :-1].float()
    now = logits.log_softmax(-1).gather(-1, ids[:, 1:, None].to(device)).squeeze(-1)
    ratio = (now - logprobs[:, 1:].to(device)).exp()
    gain = advantages[:, 1:].to(device)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    learned = learned[:, 1:].to(device)
    return -(surrogate * learned).sum() / learned.sum()


async def train(args: argparse.Namespace) -> None:
    """The loop: each step samples from the version that the step before has published."""
    tokenizer = AutoTokenizer.from_pretrained(args.directory)
    model = AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.bfloat16).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    with Publisher(args.store, model=args.model) as publisher:
        version = await asyncio.to_thread(publisher.publish, model.state_dict())  # the server's weights are the loop's
        for step in range(args.steps):
            fresh = {"x-hotswap-min-version": str(int(version)), "x-hotswap-wait-s": str(WAIT_S)}
            async with httpx.AsyncClient(base_url=args.url, headers=fresh, timeout=300) as client:
                answers = judge(await sample(client, args, tokenizer, step))
            wrote = sorted({number for answer in answers for number in answer.versions})
            loss = loss_of(model, answers)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            version = await asyncio.to_thread(publisher.publish, model.state_dict(), step=step)
            mean = statistics.fmean(answer.reward for answer in answers)
            by = f"{len(answers)} answers by version {', '.join(map(str, wrote))}"
            print(f"step {step}: reward {mean:.3f} of {by}; serves as version {version}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="GRPO of sums against a running server.")
    parser.add_argument("directory", help="the checkpoint that the server was started with")
    parser.add_argument("--model", default="demo", help="the model's name at the server")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--store", help="the server's store; default: that of the server of this host")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to learn")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--questions", type=int, default=8, help="questions of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to each question")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(train(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
