"""Start-up and shutdown of one instance process."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import uvicorn

from server.errors import ConfigError
from server.gpus import devices_asked, visible_devices
from server.instance.hosts import check_nodes, run_follower
from server.instance.middleware import PROBE, Admission
from server.leaving import LeavingServer
from weightsync.control.hosts import keep_to_loopback
from weightsync.errors import EngineError
from weightsync.tls import ClusterTls
from weightsync.vllm_engine import gpus
from weightsync.vllm_engine.releases import find, for_cpus, release

from .config import InstanceConfig, parse_vllm_args
from .fork_server import fork_from_here
from .forms import form_to_start_with, tell_failure
from .kernels import SAMPLER_ENV, flashinfer_samples
from .rest import rest, start_over

log = logging.getLogger("hotswap.instance")


def run_instance(config: InstanceConfig) -> None:
    """Serve until SIGTERM, which lets requests in flight end, or SIGINT; between, sleep as ordered (rest.py), and start
    anew for versions of another form (forms.py).

    Headless: the workers of this host alone (nodes.py). Raises TlsUnavailable, ConfigError.
    """
    try:  # what cannot work is said before seconds are spent on imports
        release()
    except EngineError as error:
        raise ConfigError(f"{error}.") from error
    if not for_cpus() and devices_asked(config.vllm_args):
        visible_devices(os.environ, gpus.look())
    if config.cluster_tls is not None:
        ClusterTls(config.cluster_tls)
    environment = dict(os.environ)
    prepare_environment()
    if not config.spans_hosts:
        keep_to_loopback()
    if config.headless:
        fork_from_here()
        run_follower(config)
    import uvloop

    uvloop.run(rest(config))
    fork_from_here()
    config = replace(config, form=uvloop.run(form_to_start_with(config)))
    try:
        again = uvloop.run(serve(config))
    except Exception as error:
        if config.form.swap_id is None:
            raise
        log.exception("this instance does not start for the swap %s; it goes back", config.form.swap_id)
        uvloop.run(tell_failure(config, config.form.swap_id, error))
        again = True
    if again:
        start_over(environment)


def prepare_environment() -> None:
    """Switches that must be set before vLLM is imported, here and in the processes it starts."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", "hotswap")  # media.py
    # The level that vLLM's server gives the root logger as it is made. ERROR by default, which drops our warnings.
    os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"  # its control routes have no authentication
    os.environ["HOTSWAP_INSTANCE_PID"] = str(os.getpid())
    if for_cpus():
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one engine process instead of two
        # glibc gives threads heaps of their own, where what one freed is of no use to another. Each stager would build
        # the layers that a kernel keeps for itself in other heaps, until the process held several times its versions.
        os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    elif SAMPLER_ENV not in os.environ and not flashinfer_samples(os.environ):
        os.environ[SAMPLER_ENV] = "0"
        log.warning(
            "FlashInfer's sampler is off: it has no flashinfer-jit-cache here, and no CUDA toolkit (nvcc, curand.h, "
            "libcudart, ninja, c++) to compile with. vLLM's own takes its place; %s=1 turns it on all the same",
            SAMPLER_ENV,
        )


async def serve(config: InstanceConfig) -> bool:
    """The engine, vLLM's routes and ours on one socket, and the sidecar that takes part in swaps.

    Returns whether it ended in order to start anew: to sleep, or with another form. Raises TlsUnavailable, ConfigError.
    """
    find("cli_env_setup")()
    tls = ClusterTls(config.cluster_tls) if config.cluster_tls is not None else None
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.create_server((config.host, config.port), family=family)
    port = int(listener.getsockname()[1])
    args = parse_vllm_args(config, port)
    check_nodes(args, headless=False)
    from server.instance.hosts import Tethers
    from weightsync.signing import Trust

    from .editions import Editions, WithEditions
    from .engine import start_engine
    from .sidecar import Sidecar

    tethers = Tethers()
    async with tethers.listening(args.nnodes, tls) as tether, start_engine(args, tethers, config.grammars) as engine:
        editions = Editions(engine, config.model, Trust(config.trust), engine.holds_adapters)
        answering = WithEditions(await build_app(engine, args, config), editions)
        app = Admission(answering, dead=lambda: engine.dead, key=secrets.token_urlsafe(32))
        warm = partial(warm_up, app, config.model)
        about: dict[str, Any] = {"tether": tether, "warm_up": warm, "editions": editions}
        sidecar = Sidecar(config, engine, app, config.address(port), **about)
        server = LeavingServer(_uvicorn_config(app, tls), sidecar.leave)
        sidecar.end = lambda: setattr(server, "should_exit", True)
        async with sidecar.running():
            await server.serve(sockets=[listener])
    return sidecar.starts_over


async def build_app(engine: Any, args: Any, config: InstanceConfig) -> Any:
    """vLLM's application with /generate added and provenance written into every answer."""
    from .engine import build_vllm_app
    from .generate import router
    from .middleware import ProvenanceMiddleware
    from .openapi import add_missing
    from .openapi import router as openapi_router
    from .prefixes import Holdings
    from .prefixes import router as prefixes_router
    from .replay import ROUTES

    app = await build_vllm_app(engine, args)
    app.state.hotswap_models = [config.model]
    app.state.hotswap_adapters = engine.adapters
    app.include_router(router)
    app.include_router(openapi_router)
    if engine.follows_prefixes:
        app.state.hotswap_prefixes = Holdings(engine.prefixes)
        app.include_router(prefixes_router)
    add_missing(app)
    # A parser of reasoning or tool calls has a state that depends on how its text was cut into deltas.
    chat = getattr(app.state, "openai_serving_chat", None)  # a model that only pools has none
    parsed = getattr(chat, "parser_cls", None) is not None
    resumable = ROUTES - {"/v1/chat/completions"} if parsed else ROUTES
    return ProvenanceMiddleware(app, engine.active_version, lambda: engine.dead, resumable)


async def warm_up(app: Admission, model: str) -> None:
    """Short requests to each route on the dummy weights: first-use imports and kernels cost seconds, not a client's.

    They come as probes do, for this instance admits nobody yet.
    """
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 4}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": [0], "logprobs": 1}),  # log-probabilities alone cost 1.4 s the first time
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ]
    if not for_cpus():  # accelerators have kernels of their own for it
        asks.append(("/v1/completions", {"prompt": [0], **sampled}))
        asks.append(("/v1/completions", {"prompt": [0], "seed": 1, **penalties}))
        asks.append(("/v1/completions", {"prompt": [0], "structured_outputs": {"regex": "[0-9]+"}}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport,
        base_url="http://warm-up",
        headers={"authorization": f"Bearer {app.key}", PROBE.decode(): "1"},
        timeout=None,  # noqa: S113
    ) as client:
        for path, body in asks:
            await client.post(path, json={"model": model, "max_tokens": 2, **body})


def _uvicorn_config(app: Any, tls: ClusterTls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        lifespan="on",
        ssl_context_factory=(lambda _, __: tls.server_context()) if tls is not None else None,
    )
