"""Tasks of ranks in the tests: each function runs on every rank and returns something JSON can carry."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from safetensors.torch import load_file
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import weightsync
from tests.trainer.batches import random_batch, sampled_batch
from trainer.algorithms import build_algorithm
from trainer.batch import TOKENS
from trainer.checkpoint import engine_state
from trainer.config import TrainerConfig, strict
from trainer.errors import TrainerError
from trainer.megatron.attention import local_positions, whole_sequence
from trainer.megatron.engine import Engine, StepStats
from trainer.megatron.hf_config import load_shape
from trainer.megatron.hf_files import write_shards
from trainer.megatron.parallel import gather_json, split
from trainer.publish import WeightPublisher
from trainer.tiny_model import tiny_run


@contextlib.contextmanager
def engine(path: str, parallel: dict[str, Any] | None = None, **config: Any) -> Iterator[Engine]:
    """Of the model at `path`, built from the configuration, which need not say what every engine in these tests has in
    common."""
    common: dict[str, Any] = {"data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}, "steps": 10}
    common |= {"gateway": {"url": "http://unused"}, "parallel": parallel or {}}
    if "publish" not in config:
        common["rollout"] = {"fixed_sampler": True}
    config["model"] = {"path": path} | config.get("model", {})
    parsed = strict.build(TrainerConfig, tiny_run(common | config))
    split(parsed.parallel, parsed.seed)
    try:
        yield Engine(
            parsed, load_shape(parsed.model.path), build_algorithm(parsed.algorithm, parsed.rollout.max_tokens)
        )
    finally:
        unsplit()


def unsplit() -> None:
    """Give up Megatron's groups, most of which `destroy_model_parallel` only forgets: their threads would pile up."""
    groups = [group for group in ps._global_process_group_list or [] if group is not None]
    ps.destroy_model_parallel()
    for group in groups:
        with contextlib.suppress(ValueError):  # one that it did destroy
            dist.destroy_process_group(group)
    _clear_sharding_prop_cache()  # which remembers these groups, and would give them to the next engine's DTensors


def each(of: str, asked: list[dict[str, Any]]) -> list[Any]:
    """A case with each of several arguments, one after the other in the same processes."""
    return [globals()[of](**arguments) for arguments in asked]


def complaint(of: str, **arguments: Any) -> list[Any]:
    """[kind, message, final] of the error that a case ends with on this rank."""
    try:
        globals()[of](**arguments)
    except TrainerError as error:
        return [type(error).__name__, str(error), getattr(error, "final", None)]
    return []


def logits(built: Engine, tokens: torch.Tensor) -> torch.Tensor | None:
    """[B, T, padded V] on the last pipeline stage."""
    mine = local_positions(tokens.shape[1], tokens.device)
    # Interleaved chunks want as many micro-batches as there are stages.
    count = ps.get_pipeline_model_parallel_world_size() if len(built.model) > 1 else 1

    def forward(_: Any, model: Any) -> Any:
        output = model(tokens[:, mine], mine.expand(len(tokens), -1), None)
        return output, lambda output, **_: whole_sequence(output, 1, copies=True)

    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[None] * len(built.model),
            model=built.model,
            num_microbatches=count,
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens),
            forward_only=True,
            collect_non_loss_data=True,
        )
    return gather_from_tensor_model_parallel_region(found[0]) if ps.is_pipeline_last_stage() else None


def numbers(stats: StepStats) -> dict[str, float]:
    """All that a step tells."""
    return {k: v for k, v in dataclasses.asdict(stats).items() if k != "metrics"} | stats.metrics


def parity(path: str, parallel: dict[str, int], dtype: str = "float32") -> dict[str, Any]:
    """Differences to transformers' logits and log-probs, and whether an export returns the very bytes of the file."""
    with engine(path, parallel, model={"dtype": dtype}) as built:
        fields = random_batch(built.shape.vocab)
        inputs, labels = fields[TOKENS][:, :-1], fields[TOKENS][:, 1:]
        expected = load_file(Path(path) / "expected.st")["logits"]
        result: dict[str, Any] = {}
        if (mine := logits(built, inputs)) is not None:
            result["logits"] = (mine[..., : built.shape.vocab] - expected).abs().max().item()
        if (logprobs := built.logprobs(fields)) is not None:
            reference = expected.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
            result["logprobs"] = (logprobs - reference).abs().max().item()
        original = load_file(Path(path) / "model.safetensors")
        exported = dict(built.export("float32"))
        pieces = [[s.name, s.dim, s.start, list(s.tensor.shape)] for s in built.slices("float32")]
        result["exported"] = sorted(exported)
        result["exact"] = all(torch.equal(tensor, original[name]) for name, tensor in exported.items())
        result["slices_exact"] = all(
            torch.equal(s.tensor, original[s.name].narrow(s.dim, s.start, s.tensor.shape[s.dim]))
            for s in built.slices("float32")
        )
        result["covered"] = sorted(name for part in gather_json(pieces) for name, *_ in part)
        result["elements"] = sum(torch.Size(shape).numel() for part in gather_json(pieces) for *_, shape in part)
        return result


def losses(
    path: str,
    parallel: dict[str, int],
    steps: int = 4,
    *,
    save_at: int = 0,
    directory: str = "",
    resume: bool = False,
    **config: Any,
) -> list[list[float]]:
    """[loss, grad_norm] of each step on fixed batches; optionally saves after a step, or starts from what was saved."""
    with engine(path, parallel, **{"optimizer": {"lr": 1e-2}} | config) as built:
        first = 0
        if resume:
            engine_state.load(built, Path(directory))
            first = save_at
        trained = []
        for step in range(first, steps):
            stats = built.step(random_batch(built.shape.vocab, rows=7, seed=step))
            trained.append([stats.loss, stats.grad_norm])
            if step + 1 == save_at and not resume:
                engine_state.save(built, Path(directory))
        return trained


def grpo(path: str, parallel: dict[str, int], **more: Any) -> list[dict[str, float]]:
    """All numbers of three GRPO steps with a KL term to the initial weights, in two minibatches each."""
    algorithm = {"name": "grpo", "kl_coef": 0.1, "minibatches": 2}
    config = {"algorithm": algorithm, "optimizer": {"lr": 1e-2}, "micro_batch": 2}
    with engine(path, parallel, **config | more) as built:
        return [numbers(built.step(sampled_batch(built.shape.vocab, seed=step))) for step in range(3)]


@contextlib.contextmanager
def publishing(
    path: str, parallel: dict[str, int], store: str, dtype: str, lora: dict[str, Any] | None = None, **more: Any
) -> Iterator[tuple[Engine, WeightPublisher]]:
    """An engine and its publisher; without a store, to a bucket alone."""
    section: dict[str, Any] = (
        {"model": "tiny", "dtype": dtype, "timeout_s": 120} | ({"store": store} if store else {}) | more
    )
    with engine(path, parallel, publish=section, lora=lora) as built:
        assert built.config.publish is not None
        with contextlib.closing(WeightPublisher(built.config.publish, built)) as publisher:
            yield built, publisher


def publish(
    path: str, parallel: dict[str, int], store: str, dtype: str = "float32", steps: int = 0, **more: Any
) -> list[int | None]:
    """The initial weights as one version, then one after each of `steps` training steps; the versions."""
    with publishing(path, parallel, store, dtype, **more) as (built, publisher):
        versions = [publisher.publish(0).version]
        for step in range(steps):
            built.step(random_batch(built.shape.vocab, seed=step))
            versions.append(publisher.publish(step + 1).version)
        return versions


def publish_quantized(
    path: str, parallel: dict[str, int], store: str, quantize: dict[str, Any], directory: str
) -> list[int]:
    """The weights after one step as a version, and their bfloat16 export in `directory`; how many bytes of quantised
    weights this rank wrote."""
    with publishing(path, parallel, store, "bfloat16", quantize=quantize) as (built, publisher):
        built.step(random_batch(built.shape.vocab))
        write_shards(directory, built.export("bfloat16"), built.part)
        publisher.publish(1)
        made = [piece.tensor for piece in publisher._slices() if piece.tensor.dtype.itemsize == 1]
        return [sum(tensor.nbytes for tensor in made)]


def publish_taken_over(path: str, store: str) -> None:
    """By a publisher whose lineage another one has taken."""
    with publishing(path, {}, store, "float32") as (_, ours), weightsync.Publisher(store, model="tiny") as theirs:
        theirs.hold()
        ours.publish(0)


from tests.trainer.cases.algorithms import *  # noqa: E402, F403
from tests.trainer.cases.api import *  # noqa: E402, F403
from tests.trainer.cases.checkpoints import *  # noqa: E402, F403
from tests.trainer.cases.layouts import *  # noqa: E402, F403
from tests.trainer.cases.lora import *  # noqa: E402, F403
from tests.trainer.cases.memory import *  # noqa: E402, F403
from tests.trainer.cases.packing import *  # noqa: E402, F403 - cases of their own file
from tests.trainer.cases.publishers import *  # noqa: E402, F403
