"""Every router of the admin port, in one list."""

from __future__ import annotations

from fastapi import APIRouter

from server.gateway.admin import adapters_sglang, adapters_vllm, keys, pause, routes, upload

routers: list[APIRouter] = [routes.router, upload.router, pause.router, keys.router]
routers += [adapters_vllm.router, adapters_sglang.router]
