"""Every router of the admin port, in one list."""

from __future__ import annotations

from fastapi import APIRouter

from server.gateway.admin import adapters_sglang, adapters_vllm, instances, keys, pause, routes, series, sleep, upload
from server.gateway.console import routes as console

routers: list[APIRouter] = [
    routes.router,
    instances.router,
    series.router,
    upload.router,
    pause.router,
    sleep.router,
    keys.router,
    adapters_vllm.router,
    adapters_sglang.router,
    console.router,
]
