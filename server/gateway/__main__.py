"""`python -m server.gateway`, which `hotswap gateway` is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from server.errors import ConfigError
from server.gateway.config import (
    FailoverSettings,
    GatewayConfig,
    HealthSettings,
    Limits,
    ObserveSettings,
    QueueSettings,
    UpstreamSettings,
)
from server.gateway.fleet import routing
from server.gateway.workers import Place
from weightsync import tls
from weightsync.errors import StoreError, TlsUnavailable


def parser() -> argparse.ArgumentParser:
    """The options; their defaults are those of `GatewayConfig`."""
    limits, upstream, queue = Limits(), UpstreamSettings(), QueueSettings()
    p = argparse.ArgumentParser(prog="hotswap gateway", description="The public port in front of the instances.")
    p.add_argument("--store", default=os.environ.get("HOTSWAP_STORE"), help="store URL (default: $HOTSWAP_STORE)")
    p.add_argument("--model", required=True, help="served model name")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on")
    p.add_argument("--port", type=int, default=8000, help="port to listen on")
    p.add_argument("--admin-host", default="127.0.0.1", help="address of the admin port; keep it private")
    p.add_argument("--admin-port", type=int, help="port of /admin/* (default: the one after --port, or any free one)")
    p.add_argument("--admin-key-file", type=Path, help="file with the admin key, made (0600) if it does not exist")
    p.add_argument("--api-key-file", type=Path, help="file with keys for inference, one a line")
    p.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="page that may ask while no key is needed"
    )
    p.add_argument("--require-key", action="store_true", help="ask for a key for inference even before there is one")
    p.add_argument("--max-body", type=int, default=limits.max_body, help="largest request body, bytes")
    p.add_argument("--max-buffered", type=int, default=limits.max_buffered, help="request bodies held at a time, bytes")
    p.add_argument("--max-head", type=int, default=limits.max_head, help="request line and headers, bytes")
    p.add_argument("--max-headers", type=int, default=limits.max_headers, help="headers of a request")
    p.add_argument("--max-connections", type=int, default=limits.max_connections, help="open at a time")
    p.add_argument("--keep-alive", type=float, default=limits.keep_alive_s, help="idle connections are closed after, s")
    p.add_argument("--write-timeout", type=float, default=limits.stalled_client_s, help="client that takes nothing, s")
    p.add_argument("--request-timeout", type=float, default=limits.request_timeout_s, help="to receive a request, s")
    p.add_argument("--connect-timeout", type=float, default=upstream.connect_timeout_s, help="to an instance, s")
    p.add_argument("--read-timeout", type=float, default=upstream.read_idle_timeout_s, help="silent instance, s")
    p.add_argument("--hold", type=float, default=upstream.hold_s, help="to wait for an instance before 503, s")
    p.add_argument("--max-in-flight", type=int, help="requests at an instance (default: what it can run; 0: any)")
    p.add_argument("--max-queued", type=int, default=queue.max_entries, help="requests that wait for room, at most")
    p.add_argument("--max-queued-bytes", type=int, default=queue.max_bytes, help="bytes of their bodies, at most")
    p.add_argument("--max-queue-wait", type=float, default=queue.max_wait_s, help="longest wait for room, s")
    health = upstream.health
    p.add_argument("--eject-after", type=int, default=health.eject_after, help="failures in a row of an instance")
    p.add_argument("--max-ejected", type=float, default=health.max_ejected, help="share of the instances, 0 to 1")
    p.add_argument("--retry-share", type=float, default=upstream.retry_share, help="of requests retried, 0 to 1")
    p.add_argument("--routing", default=routing.DEFAULT, metavar="POLICY", help=f"who is asked: {routing.CHOICES}")
    failover = upstream.failover
    p.add_argument(
        "--failover", choices=("same", "any", "off"), default=failover.mode,
        help="who goes on with a stream whose instance dies: one of the same version, of any if none runs it, nobody",
    )  # fmt: skip
    p.add_argument("--failover-bytes", type=int, default=failover.max_bytes, help="kept for that, of all streams")
    p.add_argument("--failover-idle", type=float, default=0.0, help="silent stream taken for a dead one, s (0: never)")
    p.add_argument("--cache-scope", choices=("key", "shared"), default="key", help="who shares prefix cache blocks")
    p.add_argument("--leave", type=float, default=0.0, help="on SIGTERM: not ready for so long before it stops, s")
    p.add_argument("--keep-versions", type=int, default=GatewayConfig.keep_versions, help="versions kept staged")
    p.add_argument("--probes", type=Path, help="file with prompts that a canary is asked in rolling swaps")
    p.add_argument("--max-logprob-drift", type=float, help="mean drift of a canary's log-probabilities let pass")
    p.add_argument("--swap-deadline", type=float, default=GatewayConfig.swap_deadline_s, help="to stage everywhere, s")
    p.add_argument("--workers", default="1", help="processes on the port, or `auto`: one for each core")
    p.add_argument("--no-coordinator", action="store_true", help="leave swaps to another gateway of this model")
    p.add_argument("--ssl-certfile", type=Path, help="serve TLS with this certificate chain")
    p.add_argument("--ssl-keyfile", type=Path, help="private key of --ssl-certfile")
    p.add_argument(
        "--cluster-tls", type=Path, default=os.environ.get(tls.ENVIRONMENT) or None,
        help="directory with tls.crt, tls.key, ca.crt: this member's certificate (default: $HOTSWAP_CLUSTER_TLS)",
    )  # fmt: skip
    p.add_argument("--plain-asgi", action="store_true", help="forward from an ASGI app, over uvicorn's own protocol")
    p.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    p.add_argument("--log-format", choices=("text", "json"), default="text", help="of the lines on stderr")
    p.add_argument("--access-log", type=float, help="share of requests with a line (default: 1 with json, else 0)")
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None
    p.add_argument(
        "--otlp-endpoint", default=endpoint,
        help="trace requests to this collector, http://HOST:4318 (default: $OTEL_EXPORTER_OTLP_ENDPOINT)",
    )  # fmt: skip
    p.add_argument("--trace-sample-ratio", type=float, default=1.0, help="share of the traces begun here")
    return p


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(
        max_body=args.max_body,
        max_head=args.max_head,
        max_headers=args.max_headers,
        request_timeout_s=args.request_timeout,
        keep_alive_s=args.keep_alive,
        stalled_client_s=args.write_timeout,
        max_connections=args.max_connections,
        max_buffered=args.max_buffered,
    )


def config_from(args: argparse.Namespace, worker: Place | None = None) -> GatewayConfig:
    """Checked settings. Raises ConfigError. The admin key itself is taken from the environment, never from argv."""
    if not args.store:
        raise ConfigError("--store: give a store URL such as sqlite:///var/lib/hotswap/store.db, or set HOTSWAP_STORE.")
    return GatewayConfig(
        store=args.store,
        model=args.model,
        host=args.host,
        port=args.port,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        admin_key=os.environ.get("HOTSWAP_ADMIN_KEY") or None,
        admin_key_file=args.admin_key_file,
        api_key_file=args.api_key_file,
        require_key=args.require_key,
        allowed_origins=tuple(args.allow_origin),
        limits=_limits(args),
        upstream=UpstreamSettings(
            connect_timeout_s=args.connect_timeout,
            read_idle_timeout_s=args.read_timeout,
            hold_s=args.hold,
            max_in_flight=args.max_in_flight,
            health=HealthSettings(eject_after=args.eject_after, max_ejected=args.max_ejected),
            retry_share=args.retry_share,
            routing=args.routing,
            failover=FailoverSettings(args.failover, args.failover_bytes, idle_s=args.failover_idle),
        ),
        queue=QueueSettings(args.max_queued, args.max_queued_bytes, args.max_queue_wait),
        observe=ObserveSettings(args.log_format, args.access_log, args.otlp_endpoint, args.trace_sample_ratio),
        cache_scope=args.cache_scope,
        keep_versions=args.keep_versions,
        leave_s=args.leave,
        probes_file=args.probes,
        max_logprob_drift=args.max_logprob_drift,
        swap_deadline_s=args.swap_deadline,
        workers=_workers(args.workers),
        worker=worker,
        run_coordinator=not args.no_coordinator and (worker is None or worker.leads),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        cluster_tls=args.cluster_tls,
        log_level=args.log_level,
        plain_asgi=args.plain_asgi,
    )


def _workers(text: str) -> int:
    if text == "auto":
        return len(os.sched_getaffinity(0))
    if not text.isdecimal():
        raise ConfigError(f"--workers {text}: must be a number of processes, or `auto` for one for each core.")
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a gateway until it is told to stop. A setting that cannot work ends it with one line and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    try:
        from server.gateway.main import run

        run(config_from(args, Place.taken()), argv)
    except (ConfigError, StoreError, TlsUnavailable) as exc:
        print(f"hotswap gateway: {exc}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # uvicorn has shut down in order and hands the signal on
        sys.exit(130)


if __name__ == "__main__":
    main()
