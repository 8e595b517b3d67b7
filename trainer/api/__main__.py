"""`python -m trainer.api --config FILE [--set key=value ...]`: serve the training API until SIGTERM.

Exit status: 0 ended as asked, 1 failed while running, 2 the configuration or the model must be corrected.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import uvicorn

from trainer.api.config import ApiConfig, load
from trainer.config import ParallelConfig
from trainer.errors import ConfigError, TrainerError
from trainer.main import quiet
from trainer.megatron.hf_config import load_shape
from trainer.megatron.hf_files import HfTensors


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, serve. Returns the exit status."""
    parsed = _parser().parse_args(arguments)
    quiet()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        config = load(parsed.config, parsed.set)
        serve(config)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def serve(config: ApiConfig) -> None:
    """Returns when the process is asked to end. Raises TrainerError."""
    shape = load_shape(config.model.path)
    if not config.model.random_init:
        HfTensors(config.model.path).check(shape.schema("float32"))
    lock = _alone(Path(config.directory))
    from trainer.api.app import Door, build_app
    from trainer.api.finetuning.files import Files
    from trainer.api.finetuning.jobs import Jobs
    from trainer.api.finetuning.models import Models
    from trainer.api.finetuning.routes import Desk, add
    from trainer.api.journal import Journal
    from trainer.api.sampling import Gateway, Sampler, Snapshots
    from trainer.api.service import Service
    from trainer.api.tenants import Tenants
    from trainer.megatron.parallel import distributed

    journal = Journal(Path(config.directory) / "journal.db")
    with distributed(ParallelConfig(), config.seed), ThreadPoolExecutor(1, thread_name_prefix="model") as work:
        tenants = work.submit(partial(Tenants, full=config.full), config.model, shape, config.micro_tokens).result()

        async def run() -> None:
            gateway, snapshots = Gateway(config.gateway), Snapshots(config, shape)
            service = Service(config, journal, tenants, work, snapshots)
            door = Door(service, gateway, Sampler(gateway, snapshots))
            jobs = Jobs(service, Files(config, journal))

            async def start() -> None:
                await service.queue.start()
                await jobs.start()

            async def stop() -> None:
                await door.close()
                await jobs.close()
                await service.queue.close()
                await snapshots.close()
                await gateway.close()

            app = build_app(door, start, stop)
            add(app, Desk(jobs, Models(service, jobs, gateway, snapshots)))
            server = uvicorn.Config(
                app,
                config.host,
                config.port,
                log_level="warning",
                timeout_graceful_shutdown=2,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
            await uvicorn.Server(server).serve()

        try:
            asyncio.run(run())
        finally:
            journal.close()
            os.close(lock)


def _alone(directory: Path) -> int:
    """An open lock on the directory, which ends with this process. Raises ConfigError."""
    import fcntl

    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError("directory", f"{directory} is another server's", "End it, or choose another") from None
    return lock


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hotswap train-server", description="Serve the training API.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML; trainer/configs/api.yaml is an example")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override a value, e.g. port=8400")
    return parser


if __name__ == "__main__":
    sys.exit(main())
