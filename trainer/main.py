"""`python -m trainer.main --config FILE [--set key=value ...]`: train, on as many processes as the layout asks for.

Exit status: 0 done, 1 failed while running, 2 the configuration or the inputs must be corrected, 143 saved and left
after SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from contextlib import closing
from pathlib import Path

from trainer import devices
from trainer.config import TrainerConfig, load
from trainer.errors import ConfigError
from trainer.launch import RunDir, die_with_parent, is_first, is_rank, launch, status_of
from trainer.megatron.hf_config import ModelShape, load_shape
from trainer.megatron.hf_files import HfTensors
from trainer.metrics import build_writers, silent
from weightsync.ray_cluster import STRATEGIES


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, then launch the ranks or be one. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = _parser().parse_args(arguments)
    return status_of(lambda: _asked(arguments, parsed))


def _asked(arguments: list[str], parsed: argparse.Namespace) -> int:
    config = load(parsed.config, parsed.set)
    if parsed.report is not None:
        return _report(config, parsed.report)
    if parsed.plan:
        return _plan(config, parsed)
    if parsed.show is not None:
        return _show(config, parsed.show)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads(config)))  # before torch is imported, here and by the ranks
    if parsed.ray is None:  # Ray gives its ranks theirs
        shared = config.memory is not None and config.memory.serving is not None
        store = config.publish.store_url if config.publish is not None else ""
        devices.take(config.devices, config.parallel.world_size, store, shared=shared)
    shape = check(config)
    if parsed.ray is not None and not is_rank():
        from trainer.ray_ranks import absolute
        from trainer.ray_ranks import launch as launch_on_ray

        ranks = absolute(arguments, Path(parsed.config))
        return launch_on_ray(ranks, config, parsed.ray, parsed.ray_bundle, parsed.ray_strategy)
    if (config.parallel.world_size > 1 or config.faults.max_restarts) and not is_rank():
        return launch("trainer.main", arguments, config.parallel, config.faults)
    if RunDir.of_environment().final() is not None:
        return 0  # a restart would only repeat what ended the run, and is not to be followed by another
    _run_rank(config, shape, parsed)
    return 0


def check(config: TrainerConfig) -> ModelShape:
    """Everything that can be found wrong before a process group exists. Raises TrainerError."""
    shape = load_shape(config.model.path)
    shape.check_parallel(config.parallel)
    HfTensors(config.model.path).check(shape.schema("float32"))
    if config.checkpoint is not None:
        _check_writable("checkpoint.path", config.checkpoint.path)
    if config.save_to is not None:
        _check_writable("save_to", config.save_to)
    if config.telemetry is not None:
        config.telemetry.admin_key()
    if config.watch.wandb is not None:
        config.watch.wandb.check_key()
        _check_writable("watch.wandb.dir", config.watch.wandb.dir)
    if config.watch.tensorboard is not None:
        _check_writable("watch.tensorboard", config.watch.tensorboard)
    if config.metrics != "-":
        _check_writable("metrics", str(Path(config.metrics).parent))
    return shape


def threads(config: TrainerConfig) -> int:
    """How many threads a rank computes with: one, or its share of the host's cores if an optimizer works there."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.world_size))
    return max(len(os.sched_getaffinity(0)) // here, 1) if config.optimizer.offload else 1


def _check_writable(key: str, path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(key, f"cannot make the directory {path} ({error.strerror})", "Choose another") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(key, f"may not write into {path}", "Change its mode, or choose another directory")


def _run_rank(config: TrainerConfig, shape: ModelShape, parsed: argparse.Namespace) -> None:
    quiet()
    if is_rank():
        die_with_parent()
    from trainer.faults.supervision import Faults
    from trainer.loop import train
    from trainer.megatron.parallel import distributed
    from trainer.memory.build import open_serving
    from trainer.run import Run

    if parsed.export is not None:
        with distributed(config.parallel, config.seed, config.faults.collective_timeout_s):
            _export(config, shape, parsed.export, parsed.step)
        return
    with (
        distributed(config.parallel, config.seed, config.faults.collective_timeout_s),
        Faults(config.faults) as faults,
        closing(build_writers(config) if is_first() else silent()) as metrics,
        closing(open_serving(config, shape)) as serving,
        closing(Run(config, shape, metrics, serving)) as run,
    ):
        run.faults = faults
        train(run)


def _export(config: TrainerConfig, shape: ModelShape, directory: str, step: int | None) -> None:
    """Write the weights of a saved checkpoint as a Hugging Face checkpoint directory. Collective; trains nothing."""
    from trainer.algorithms import build_algorithm
    from trainer.exports import export_saved
    from trainer.megatron.engine import Engine

    engine = Engine(config, shape, build_algorithm(config.algorithm, config.rollout.max_tokens))
    exported = export_saved(config, shape, engine, directory, step)
    if is_first():
        print(f"{directory}: the weights of step {exported}")


def _report(config: TrainerConfig, directory: str) -> int:
    """Write the report of what the configured run has done so far, and say where. Trains nothing."""
    if config.metrics == "-":
        advice = "Set metrics to the run's file"
        raise ConfigError("metrics", "went to standard output, so there is nothing to report on", advice)
    from trainer.report import write_report

    print(write_report([config.metrics], directory or None))
    return 0


def _plan(config: TrainerConfig, parsed: argparse.Namespace) -> int:
    """Print the memory a layout needs, and the layout to choose. Trains nothing, and reads no weights."""
    from trainer.plan import PlanOptions, print_plan

    print_plan(config, PlanOptions(parsed.gpus, parsed.gpu_memory, parsed.gpus_per_node, parsed.length))
    return 0


def _show(config: TrainerConfig, count: int) -> int:
    """Print the first records in the run's order, read as it reads them. Trains nothing, and reads no weights."""
    from trainer.algorithms import build_algorithm
    from trainer.batch import Sequence
    from trainer.data import run_records
    from trainer.data.hub import at_commits
    from trainer.data.records import place, take
    from trainer.data.show import shown
    from trainer.data.tokenizer import model_tokenizer

    algorithm, tokenizer = build_algorithm(config.algorithm, config.rollout.max_tokens), model_tokenizer(config.model)
    config = at_commits(config, keep=False)
    records = run_records(config, tokenizer, algorithm.learns, load_shape(config.model.path).max_positions)
    for index in take(len(records), config.seed, 0, count):
        record = records[index]
        asked = [Sequence(record.prompt_ids, ())]
        for sequence in asked if algorithm.learns == "samples" else algorithm.sequences([record], []):
            print(f"--- record {index}{place(records, index)}: {shown(sequence, tokenizer)}")
    return 0


def quiet() -> None:
    """Megatron warns about optional CUDA packages that nothing here uses."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\b.*")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hotswap train", description="Train a model; publish it live.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML; trainer/configs has examples")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override a value, e.g. optimizer.lr=1e-4")
    parser.add_argument(
        "--report", nargs="?", const="", metavar="DIR", help="write plots and Markdown of the run instead of training"
    )
    parser.add_argument(
        "--show",
        type=int,
        metavar="N",
        help="print the first N records, the learned in [[...]], instead of training",
    )
    ray = parser.add_argument_group("ranks on the nodes of a Ray cluster")
    ray.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help="of the cluster (default: auto)")
    ray.add_argument("--ray-bundle", metavar="NAME=AMOUNT,...", help="resources of a rank (default: CPU=1, and a GPU)")
    ray.add_argument(
        "--ray-strategy", choices=STRATEGIES, default="PACK", help="how Ray places the ranks (default: %(default)s)"
    )
    export = parser.add_argument_group("export")
    export.add_argument("--export", metavar="DIR", help="write a saved checkpoint's weights in Hugging Face's layout")
    export.add_argument("--step", type=int, metavar="N", help="of which checkpoint (default: the newest)")
    plan = parser.add_argument_group("plan")
    plan.add_argument("--plan", action="store_true", help="print layout and memory instead of training")
    plan.add_argument("--gpus", type=int, metavar="N", help="how many there are (default: as configured)")
    plan.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="of each (default: 80)")
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="joined by a fast bus (default: 8)")
    plan.add_argument("--length", type=int, metavar="TOKENS", help="of a sequence (default: the model's, up to 4096)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
