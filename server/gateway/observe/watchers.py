"""The access log and traces of one gateway, as its settings ask for them. Neither costs anything when it is off."""

from __future__ import annotations

from collections.abc import Callable

from server.gateway.config import ObserveSettings
from server.gateway.observe.access_log import AccessLog
from server.gateway.observe.logs import stderr
from server.gateway.observe.stats import Stats
from server.gateway.observe.tracing import Tracer


def open_watchers(settings: ObserveSettings, model: str, stats: Stats, leads: Callable[[], bool]) -> Callable[[], None]:
    """Begins what `settings` ask for; the result ends it, and may take seconds. Swaps are traced while `leads`.

    Raises ConfigError.
    """
    ending: list[Callable[[], None]] = []
    if settings.otlp_endpoint is not None:
        from server.gateway.observe.otlp import SpanSender

        sender = SpanSender(settings.otlp_endpoint, stats.spans)
        stats.watchers.append(Tracer(sender, model, settings.trace_ratio))
        stats.swaps.trace(sender, leads)
        ending.append(sender.close)
    if settings.access_share > 0.0:  # after the tracer, so that lines have ids of traces
        stats.watchers.append(AccessLog(stderr(), settings.access_share, settings.log_format))
        ending.append(stderr().flush)  # a process that ends by a signal runs nothing more

    def close() -> None:
        for end in ending:
            end()

    return close
