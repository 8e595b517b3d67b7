"""The dependencies that routes ask FastAPI for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request

from server.gateway.access.records import By
from server.gateway.gateway import Gateway


def gateway_of(request: Request) -> Gateway:
    """The gateway of this process."""
    gateway: Gateway = request.state.gateway
    return gateway


Reason = Annotated[str, Query(max_length=500, description="why; the ledger keeps it")]


def by_of(request: Request, reason: Reason = "") -> By:
    """Who asks, and why. The gate has checked the key or the token."""
    principal = request.state.principal
    return By(principal.who or principal.name, " ".join(reason.split()), principal.digest)


ByDep = Annotated[By, Depends(by_of)]
GatewayDep = Annotated[Gateway, Depends(gateway_of)]
