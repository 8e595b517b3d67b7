"""The dependencies that routes ask FastAPI for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from server.gateway.gateway import Gateway


def gateway_of(request: Request) -> Gateway:
    """The gateway of this process."""
    gateway: Gateway = request.state.gateway
    return gateway


GatewayDep = Annotated[Gateway, Depends(gateway_of)]
