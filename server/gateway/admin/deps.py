"""The dependencies that routes ask FastAPI for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request

from server.errors import HttpError
from server.gateway.access.records import ADMIN, By
from server.gateway.gateway import Gateway
from server.gateway.models.model import Model


def gateway_of(request: Request) -> Gateway:
    """The gateway of this process."""
    gateway: Gateway = request.state.gateway
    return gateway


Reason = Annotated[str, Query(max_length=500, description="why; the ledger keeps it")]


def by_of(request: Request, reason: Reason = "") -> By:
    """The author of the request, and the reason. The gate has checked the key or the token."""
    principal = request.state.principal
    admin = ADMIN in principal.scopes
    told = "".join(c if c.isprintable() else " " for c in reason)  # as an argument of a process, and in logs
    return By(principal.who or principal.name, " ".join(told.split()), principal.digest, admin)


def model_of(
    gateway: Annotated[Gateway, Depends(gateway_of)],
    asked: Annotated[str, Query(alias="model", max_length=200, description="which one, where there are several")] = "",
) -> Model:
    """The model that a control route is asked about. Raises HttpError (404, 400)."""
    if asked:
        found = gateway.models.get(asked)
        if found is None:
            known = ", ".join(gateway.models)
            raise HttpError(
                404, f"No model {asked!r} is served here; there are: {known}.", code="unknown_model", param="model"
            )
        return found
    if len(gateway.models) > 1:
        known = ", ".join(gateway.models)
        raise HttpError(
            400, f"Say which model, with ?model=NAME; there are: {known}.", code="model_needed", param="model"
        )
    return gateway.default


ByDep = Annotated[By, Depends(by_of)]
ModelDep = Annotated[Model, Depends(model_of)]
GatewayDep = Annotated[Gateway, Depends(gateway_of)]
