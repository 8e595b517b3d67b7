"""Writes the OpenAPI documents of both ports into a directory: `python scripts/openapi.py DIRECTORY`.

No engine is started: vLLM says what its routes take from their Python types alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
from fastapi import FastAPI

from server.gateway import openapi
from server.gateway.app import build_app
from server.gateway.config import GatewayConfig
from server.instance import openapi as instance
from server.instance.config import vllm_parser
from server.instance.main import prepare_environment


def main(directory: Path) -> None:
    """public.json and admin.json."""
    app = build_app(GatewayConfig(store="sqlite:///nowhere/store.db", model="NAME"))
    directory.mkdir(parents=True, exist_ok=True)
    public = openapi.public(app, instance.document(_vllm_app()), key_required=False)
    (directory / "public.json").write_bytes(orjson.dumps(public))
    (directory / "admin.json").write_bytes(openapi.admin(app))


def _vllm_app() -> FastAPI:
    prepare_environment()
    from vllm.entrypoints.launchers.app import build_app as vllm_app

    args = vllm_parser().parse_args(["--enable-tokenizer-info-endpoint"])
    return vllm_app(args, ("generate", "embed"), None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
