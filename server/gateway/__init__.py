"""The public port: keys, limits, routing and the streaming proxy, health and metrics; the admin port beside it.

    wire/     bytes and HTTP/1.1: heads, answers on their way through, connections to instances
    access/   keys, and whose prefix cache a key may hit
    queue/    who waits, and who goes next, when the instances have no room
    fleet/    the store's view of the instances, their signals and health, the routing policy (routing.py), retries
    models/   each model whole: its pushes, its probes of a canary; how a request finds its model
    release/  releases that are judged by their answers
    admin/    the control routes of the admin port, other trainers' routes; what else the app answers
    console/  the page at /console: its files, and what serves them
    observe/  plain counts, logs, traces

    connection.py is what one client connection does, exchange.py one forwarded request, admission.py what is between
    them, app_side.py what uvicorn does of a connection; routes.py lists the routes that are forwarded, terms.py what a
    request may ask for.
    main.py starts the process; gateway.py is what it holds, with its background tasks; app.py is the FastAPI side;
    middleware.py says what each port shows; metrics.py shows the counts to Prometheus; config.py has every setting.

Imports neither torch nor vLLM.
"""

from server.gateway.config import GatewayConfig, HealthSettings, Limits, QueueSettings, UpstreamSettings

__all__ = ["GatewayConfig", "HealthSettings", "Limits", "QueueSettings", "UpstreamSettings", "run"]


def run(config: GatewayConfig) -> None:
    """Serves until told to stop; see `server.gateway.main.run`."""
    from server.gateway.main import run as serve

    serve(config)
