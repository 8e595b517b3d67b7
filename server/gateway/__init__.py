"""The public port: keys, limits, routing and the streaming proxy; health, metrics and admin beside it.

    main.py       starts the process        gateway.py   what the process holds, its background tasks
    protocol.py   the client's connection   exchange.py  one forwarded request, state by state
    relay.py      response bytes in, out    upstream.py  connections to an instance, pooled
    routes.py     what is public            head.py      request headers in, out
    fleet.py      the store's view          routing.py   which instance
    auth.py       keys and scopes           app.py       FastAPI: health, metrics, admin
    admin.py      /admin/*                  push.py      publishing, in a process of its own
    stats.py      plain counts              metrics.py   the same for Prometheus
    guard.py      framing, sizes, times     answers.py   our own answers, as bytes
    middleware.py the admin key, ids        error_map.py weightsync errors as HTTP
    deps.py       what routes ask for       json_check.py is a body a JSON object
    probe.py      health and load of an instance, signals.py what is read of it

Imports neither torch nor vLLM.
"""

from server.gateway.config import GatewayConfig, Limits, UpstreamSettings

__all__ = ["GatewayConfig", "Limits", "UpstreamSettings", "run"]


def run(config: GatewayConfig) -> None:
    """Serves until told to stop; see `server.gateway.main.run`."""
    from server.gateway.main import run as serve

    serve(config)
