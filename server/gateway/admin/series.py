"""`/admin/series` and `/admin/training/metrics`: the curves of the console, and where a trainer reports its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, FiniteFloat, RootModel, model_validator

from server.gateway.deps import GatewayDep

router = APIRouter(prefix="/admin", tags=["admin"])

MAX_FIELDS = 64
LARGEST_STEP = 2**53  # above it a JSON number is no exact integer to a browser

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}$")]


class StepMetrics(RootModel[Annotated[dict[Name, FiniteFloat], Field(min_length=2, max_length=MAX_FIELDS)]]):
    """Numbers by name; `step` is one of them, `reward`, `loss`, `accuracy` and `version` are what the console draws."""

    @model_validator(mode="after")
    def _has_a_step(self) -> StepMetrics:
        step = self.root.get("step")
        if step is None or step != int(step) or not 0 <= step <= LARGEST_STEP:
            raise ValueError(f"`step` must be there, a whole number from 0 to {LARGEST_STEP}")
        if "time" in self.root:
            raise ValueError("`time` is set by the gateway; leave it out")
        return self


@router.post("/training/metrics")
async def report(gateway: GatewayDep, body: StepMetrics) -> dict[str, Any]:
    """Keeps what a trainer reports of one step; several requests of the same step are put together."""
    return {"point": await gateway.training.add(body.root)}


@router.get("/series")
async def series(gateway: GatewayDep) -> dict[str, Any]:
    """Throughput of the fleet over the last ten minutes, and the training's last steps."""
    return {
        "model": gateway.config.model,
        "throughput": [asdict(sample) for sample in gateway.throughput.samples],
        "training": gateway.training.points,
    }
