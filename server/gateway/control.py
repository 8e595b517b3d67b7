"""Every router of the admin port, in one list."""

from __future__ import annotations

from fastapi import APIRouter

from server.gateway import adapters_sglang, adapters_vllm, admin, pause, upload

routers: list[APIRouter] = [admin.router, upload.router, pause.router, adapters_vllm.router, adapters_sglang.router]
