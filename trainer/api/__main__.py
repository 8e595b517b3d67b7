"""`python -m trainer.api --config FILE [--set key=value ...]`: serve the training API until SIGTERM, on as many
processes as the layout asks for.

Rank 0 has the routes, the queue and the journal. The other ranks do what it is asked (tenants.py). When one dies, rank
0 tells the clients that wait to ask again, and the launcher starts all anew, from the journal.

Exit status: 0 ended as asked, 1 failed while running, 2 the configuration or the model must be corrected, 143 ended by
SIGTERM where there are several ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from trainer import devices
from trainer.api.config import ApiConfig, load
from trainer.errors import ConfigError
from trainer.launch import TERMINATED, RunDir, die_with_parent, is_first, is_rank, launch, status_of
from trainer.main import quiet
from trainer.megatron.hf_config import ModelShape, load_shape
from trainer.megatron.hf_files import HfTensors

if TYPE_CHECKING:
    from trainer.api.queue import Queue
    from trainer.api.tenants import Tenants


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, then launch the ranks or be one. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = _parser().parse_args(arguments)
    quiet()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return status_of(lambda: _asked(arguments, load(parsed.config, parsed.set)))


def _asked(arguments: list[str], config: ApiConfig) -> int:
    devices.take(config.devices, config.parallel.world_size, config.publish.store_url)
    shape = load_shape(config.model.path)
    shape.check_parallel(config.parallel)
    HfTensors(config.model.path).check(shape.schema("float32"))
    if config.parallel.world_size > 1 and not is_rank():
        return launch("trainer.api", arguments, config.parallel, config.faults.as_trainer)
    if RunDir.of_environment().final() is not None:
        return 0  # a restart would only repeat what ended the server, and is not to be followed by another
    _be_rank(config, shape)
    return 0


def _be_rank(config: ApiConfig, shape: ModelShape) -> None:
    """Returns when the server is asked to end. Raises TrainerError."""
    if is_rank():
        die_with_parent()
    faults = config.faults.as_trainer
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(_alone(config)) if is_first() else None
        from trainer.api.tenants import Tenants
        from trainer.faults.supervision import Faults
        from trainer.megatron.engine import check_experts
        from trainer.megatron.parallel import device_name, distributed, gather_json

        check_experts(config.parallel)
        opened.enter_context(distributed(config.parallel, config.seed, faults.collective_timeout_s))
        # Rank 0 tells its clients first; the others have nobody to tell.
        watching = opened.enter_context(Faults(faults, (lambda: False) if listener is not None else None))
        if listener is not None and watching.restarted_because:
            print(f"started again ({watching.attempt}): {watching.restarted_because}", file=sys.stderr, flush=True)
        devices = gather_json(device_name())
        of_model = partial(Tenants, config.model, shape, config.micro_tokens, parallel=config.parallel)
        made = partial(of_model, full=config.full, resident=config.limits.resident)
        beginning = _Beginning(watching.attempt)
        if listener is None:
            with beginning:
                tenants = made()
            tenants.follow()
        else:
            _serve(config, shape, made, listener, beginning, devices)


class _Beginning(contextlib.AbstractContextManager[None]):
    """The ranks are not started anew after a failure within, at their first start: the failure would come again."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._attempt == 0:
            RunDir.of_environment().end(1)


def _serve(
    config: ApiConfig,
    shape: ModelShape,
    made: Callable[[], Tenants],
    listener: socket.socket,
    beginning: _Beginning,
    devices: list[str],
) -> None:
    from trainer.api.app import Door, build_app
    from trainer.api.finetuning.files import Files
    from trainer.api.finetuning.jobs import Jobs
    from trainer.api.finetuning.models import Models
    from trainer.api.finetuning.routes import Desk, add
    from trainer.api.journal import Journal
    from trainer.api.sampling import Gateway, Sampler, Snapshots
    from trainer.api.service import Service
    from trainer.megatron.parallel import use_device
    from trainer.metrics.writers import JsonLines

    with ThreadPoolExecutor(1, thread_name_prefix="model", initializer=use_device) as work:
        with beginning:
            journal = Journal(Path(config.directory) / "journal.db")
            tenants = work.submit(made).result()

        async def run() -> None:
            gateway, snapshots = Gateway(config.gateway), Snapshots(config, shape)
            service = Service(config, journal, tenants, work, snapshots)
            door = Door(service, gateway, Sampler(gateway, snapshots))
            jobs = Jobs(service, Files(config, journal))

            async def start() -> None:
                await service.queue.start()
                await jobs.start()
                told = {"model": config.name, "devices": devices, "address": _address(config, listener)}
                JsonLines("-").write("start", told | {"store": config.publish.store_url})

            async def stop() -> None:
                await door.close()
                await jobs.close()
                await service.queue.close()
                await snapshots.close()
                await gateway.close()

            app = build_app(door, start, stop)
            add(app, Desk(jobs, Models(service, jobs, gateway, snapshots)))
            about = uvicorn.Config(
                app,
                log_level="warning",
                timeout_graceful_shutdown=2,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
            await _Server(about, service.queue).serve([listener])

        try:
            asyncio.run(run())
        finally:
            journal.close()
        if tenants.ended is not None:
            raise tenants.ended
        if RunDir.of_environment().being_torn_down():
            os._exit(TERMINATED)  # a rank is gone, and the model's thread may wait for it
        work.submit(tenants.leave).result()


def _address(config: ApiConfig, listener: socket.socket) -> str:
    """The URL for clients."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """Ends with its queue, and the queue with it."""

    def __init__(self, config: uvicorn.Config, queue: Queue) -> None:
        super().__init__(config)
        self._queue = queue

    async def main_loop(self) -> None:
        ended = asyncio.create_task(self._queue.over.wait())
        ended.add_done_callback(lambda _: setattr(self, "should_exit", True))
        await super().main_loop()
        ended.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._queue.end()
        await super().shutdown(sockets)


@contextlib.contextmanager
def _alone(config: ApiConfig) -> Iterator[socket.socket]:
    """A socket at the configured address. Within the body no other server has the directory. Raises ConfigError."""
    import fcntl

    directory, family = config.directory, socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with (
        open(os.open(Path(directory) / "lock", os.O_RDWR | os.O_CREAT, 0o600), "wb") as lock,
        socket.socket(family, socket.SOCK_STREAM) as listener,
    ):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("directory", f"{directory} is another server's", "End it, or choose another") from None
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            problem = f"cannot listen at {config.host}:{config.port} ({error.strerror or error})"
            raise ConfigError("port", problem, "End what does, or choose another") from None
        yield listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hotswap train-server", description="Serve the training API.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML; trainer/configs/api.yaml is an example")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override a value, e.g. port=8400")
    return parser


if __name__ == "__main__":
    sys.exit(main())
