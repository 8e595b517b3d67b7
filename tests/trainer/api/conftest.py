"""The training API before a fleet without an engine; a module's SERVING is what its configuration says besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker

from tests.trainer.api.server import ApiServer, new, serving
from tests.trainer.fleet import Fleet


@pytest.fixture(scope="module")
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: str
) -> Iterator[tuple[ApiServer, Fleet]]:
    with serving(tmp_path_factory.mktemp("api"), tiny_model, **getattr(request.module, "SERVING", {})) as found:
        yield found


@pytest.fixture(scope="module")
def api(both: tuple[ApiServer, Fleet]) -> ApiServer:
    return both[0]


@pytest.fixture(scope="module")
def service(api: ApiServer) -> tinker.ServiceClient:
    return api.service()


@pytest.fixture
def client(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return new(service)
