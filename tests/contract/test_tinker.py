"""Routes that the `tinker` SDK asks, and those of them that the training API answers.

tests/trainer/api/test_sdk.py drives the SDK itself, and is of this tier.
"""

from __future__ import annotations

from pathlib import Path

import tinker

from tests.contract.release import asked, declared

PREFIX = "/api/v1/"
API = Path(__file__).parents[2] / "trainer" / "api" / "app.py"
THINKING_MACHINES = "of the service of Thinking Machines: accounts, billing, sharing"
BY_NUMBER = "futures are asked for one by one"
NOT_HERE = {
    "GET audit": THINKING_MACHINES, "GET billing/usage/events": THINKING_MACHINES,
    "GET billing/usage/checkpoints/current": THINKING_MACHINES,
    "POST auth/token": THINKING_MACHINES, "PUT sessions/{}/project": THINKING_MACHINES,
    "POST training_runs/{}/checkpoints/{}/publish": THINKING_MACHINES,
    "DELETE training_runs/{}/checkpoints/{}/publish": THINKING_MACHINES,
    "POST sessions/search": "sessions are listed, not searched",
    "GET sessions/{}/trace_export": "sessions are not traced",
    "POST copy_weights": "a state is loaded where it is", "POST create_custom_loss": "custom losses run at the client",
    "POST join_sampling_session": "a sampler is asked by the client that made it", "POST retrieve_futures": BY_NUMBER,
    "POST save_weights_external": "states stay in the server's directory",
    "GET training_runs/{}/checkpoints/{}/external_weights_urls": "states stay in the server's directory",
}  # fmt: skip


def test_every_route_that_the_sdk_asks_is_here_or_has_a_reason() -> None:
    modules = [path for path in Path(tinker.__file__).parent.rglob("*.py") if not path.stem.endswith("_test")]
    routes = {route.replace(PREFIX, "") for route in asked(modules, PREFIX)}
    # A checkpoint's name is its kind and its own, "weights/one".
    ours = {route.replace("/", "", 1).replace("checkpoints/{}/{}", "checkpoints/{}") for route in declared([API])}
    assert len(routes & ours) > 25
    assert routes - ours == NOT_HERE.keys()
    assert ours - routes == {"DELETE training_runs/{}"}
