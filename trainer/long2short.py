"""`python -m trainer.long2short merge|sample|pairs`: a model that thinks shorter, by Kimi k1.5's ways (arXiv
2501.12599, section 2.4; docs/trainer/algorithms.md).

`sample` and `pairs` take the configuration of a run: its data, gateway, rollouts and rewards. An answer is right when
every reward is at its best; `pairs` prefers the shortest right one to wrong ones, and to right ones of more than
`LONGER` times its length.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.config import TrainerConfig, load
from trainer.data import build_dataset
from trainer.data.records import Record, take
from trainer.data.tokenizer import Tokenizer, model_tokenizer
from trainer.errors import ConfigError, ModelError
from trainer.launch import status_of
from trainer.megatron.hf_files import HfTensors, finish_checkpoint, write_shards
from trainer.rewards import build_scorer
from trainer.rollouts.sampling import RolloutSampler
from trainer.trajectory import Trajectory, TrajectoryGroup

LONGER = 1.5
AT_ONCE = 16  # prompts whose answers are under way


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parsed = _parser().parse_args(arguments)
    return status_of(lambda: parsed.run(parsed))


def merge(long: str | Path, short: str | Path, into: str | Path, share: float = 0.5) -> None:
    """Write `share` x the long model's weights + (1 - share) x the short one's, in the long one's dtypes, with its
    configuration and tokenizer. Raises ModelError for models of other tensors."""
    one, other = HfTensors(long), HfTensors(short)
    other.check((name, "", shape) for name, shape in one.shapes.items())
    if more := other.shapes.keys() - one.shapes.keys():
        raise ModelError(f"{long} has no tensor {min(more)}, {short} has. Merge models of one architecture.")
    target = Path(into)
    target.mkdir(parents=True, exist_ok=True)

    def tensors() -> Iterator[tuple[str, Any]]:
        for name in one.shapes:
            mine = one.get(name)
            yield name, torch.lerp(other.get(name).float(), mine.float(), share).to(mine.dtype)

    written = write_shards(target, tensors(), 0)
    finish_checkpoint(target, written, long, str(one.get(next(iter(one.shapes))).dtype).removeprefix("torch."))


def shortest_right(group: TrajectoryGroup) -> Trajectory | None:
    """The right answer of the fewest tokens; None if none is right, or ended by itself."""
    right = [t for t, score in zip(group.trajectories, group.scores, strict=True) if score.full and not t.truncated]
    return min(right, key=lambda t: t.policy_tokens, default=None)


def longer_ones(group: TrajectoryGroup, chosen: Trajectory) -> list[Trajectory]:
    """Those that `chosen` is preferred to: longer wrong ones, and right ones of over `LONGER` times its length."""
    pairs = zip(group.trajectories, group.scores, strict=True)
    least = chosen.policy_tokens
    return [t for t, score in pairs if t.policy_tokens > (LONGER * least if score.full else least)]


def answers(config: TrainerConfig, records: int, samples: int) -> Iterator[tuple[Record, TrajectoryGroup, Tokenizer]]:
    """The first `records` of a run's data, with answers and scores. Raises TrainerError."""
    if config.gateway is None:
        raise ConfigError("gateway", "missing, but answers are sampled through it", "Add gateway: {url: http://...}")
    tokenizer = model_tokenizer(config.model)
    dataset = build_dataset(config.data, tokenizer, config.seed)
    scorer = build_scorer(config.rewards, config.gateway)
    about = (config.gateway, config.rollout, scorer, tokenizer, config.seed)
    with RolloutSampler(*about, environment=config.environment, model=config.served_name) as rollouts:
        for start in range(0, records, AT_ONCE):
            indices = take(len(dataset), config.seed, start, min(AT_ONCE, records - start))
            asked = [dataset[index] for index in indices]
            running = [rollouts.submit(record, samples, start + i) for i, record in enumerate(asked)]
            for record, future in zip(asked, running, strict=True):
                yield record, future.result(), tokenizer


def _merge(parsed: argparse.Namespace) -> None:
    merge(parsed.long, parsed.short, parsed.into, parsed.share)
    print(f"{parsed.into}: {parsed.share:g} of {parsed.long}, the rest of {parsed.short}")


def _sample(parsed: argparse.Namespace) -> None:
    lines, right = [], 0
    for record, group, tokenizer in _answers(parsed):
        if (chosen := shortest_right(group)) is not None:
            right += 1
            lines.append({**_about(record), "target": tokenizer.decode(chosen.token_ids)})
    _write(parsed.into, lines)
    print(f"{parsed.into}: {right} of {parsed.records} prompts had a right answer")


def _pairs(parsed: argparse.Namespace) -> None:
    lines: list[dict[str, Any]] = []
    for record, group, tokenizer in _answers(parsed):
        if (chosen := shortest_right(group)) is None:
            continue
        better = tokenizer.decode(chosen.token_ids)
        lines += [
            {**_about(record), "chosen": better, "rejected": tokenizer.decode(worse.token_ids)}
            for worse in longer_ones(group, chosen)
        ]
    _write(parsed.into, lines)
    print(f"{parsed.into}: {len(lines)} pairs of {parsed.records} prompts")


def _answers(parsed: argparse.Namespace) -> Iterator[tuple[Record, TrajectoryGroup, Tokenizer]]:
    return answers(load(parsed.config, parsed.set), parsed.records, parsed.samples)


def _about(record: Record) -> dict[str, Any]:
    prompt = list(record.messages) if record.messages else record.prompt
    answer = [record.answer, *record.alternatives] if record.alternatives else record.answer
    return {"prompt": prompt, "answer": answer, "extra": record.extra}


def _write(path: str, lines: Sequence[dict[str, Any]]) -> None:
    try:
        Path(path).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    except OSError as error:
        raise ConfigError("--into", f"cannot write {path} ({error.strerror})", "Choose another file") from None


def _share(text: str) -> float:
    if not 0.0 <= (value := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is no share between 0 and 1")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.long2short", description=__doc__.split("\n\n")[0])
    ways = parser.add_subparsers(required=True)
    merging = ways.add_parser("merge", help="average two models' weights")
    merging.add_argument("long", help="checkpoint directory of the model that thinks long")
    merging.add_argument("short", help="that of the one that thinks short")
    merging.add_argument("--into", required=True, help="directory of the merged checkpoint")
    merging.add_argument("--share", type=_share, default=0.5, help="of the long model (0.5)")
    merging.set_defaults(run=_merge)
    for name, run, what in (("sample", _sample, "shortest right answers"), ("pairs", _pairs, "preferences")):
        way = ways.add_parser(name, help=f"{what} as JSON lines")
        way.add_argument("--config", required=True, help="the configuration of a run that samples")
        way.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of it")
        way.add_argument("--into", required=True, help="the file to write")
        way.add_argument("--records", type=_count, default=1000, help="prompts (1000)")
        way.add_argument("--samples", type=_count, default=8, help="answers to each (8)")
        way.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
