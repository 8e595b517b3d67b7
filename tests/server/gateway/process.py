"""A gateway as a process of its own: `python -m tests.server.gateway.process DIRECTORY` prints its two ports."""

from __future__ import annotations

import sys

import uvicorn

from server.gateway import GatewayConfig, UpstreamSettings
from server.gateway.access import sharing
from server.gateway.main import bind, uvicorn_config
from tests.server.gateway.harness import ADMIN_KEY, MODEL

if __name__ == "__main__":
    sharing.TTL_S = 60.0  # a process that waits long for a processor keeps its lease, and the limit holds
    settings = UpstreamSettings(scrape_interval_s=3600.0, hold_s=0.0)
    store = f"sqlite://{sys.argv[1]}/store.db"
    config, listeners = bind(GatewayConfig(store, MODEL, port=0, admin_key=ADMIN_KEY, upstream=settings))
    print(config.port, config.admin_port, flush=True)
    uvicorn.Server(uvicorn_config(config)).run(sockets=listeners)
