"""The public port: keys, limits, routing and the streaming proxy, health and metrics; the admin port beside it.

    main.py       starts the process        gateway.py   what the process holds, its background tasks
    protocol.py   the client's connection   exchange.py  one forwarded request, state by state
    relay.py      response bytes in, out    upstream.py  connections to an instance, pooled
    routes.py     what is public            head.py      request headers in, out
    fleet.py      the store's view          routing.py   which instance may be asked, and which is
    admission.py  versions and policies     waiting.py   requests nobody can take for the moment
    auth.py       keys and scopes           scope.py     whose prefix cache
    guard.py      framing, sizes, times     answers.py   our own answers, as bytes
    stats.py      plain counts              metrics.py   the same for Prometheus
    app.py        FastAPI: health, metrics  control.py   every router of the admin port
    admin.py      /admin/*                  swaps.py     a swap asked for, and its report
    push.py       publishing, in a process  upload.py    versions from other hosts
    pause.py      pause leases              probes.py    the canary's questions, from probe_file.py
    middleware.py what each port shows      error_map.py weightsync errors as HTTP
    deps.py       what routes ask for       json_check.py is a body a JSON object
    probe.py      health and load of an instance, signals.py what is read of it
    adapters_vllm.py, adapters_sglang.py, trainers.py, updates.py: other trainers' routes on the same swaps

Imports neither torch nor vLLM.
"""

from server.gateway.config import GatewayConfig, Limits, UpstreamSettings

__all__ = ["GatewayConfig", "Limits", "UpstreamSettings", "run"]


def run(config: GatewayConfig) -> None:
    """Serves until told to stop; see `server.gateway.main.run`."""
    from server.gateway.main import run as serve

    serve(config)
