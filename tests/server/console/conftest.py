"""A real Chromium before a real gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.server.console.browser import Watched, chromium, watched
from tests.server.console.play import Script, admin_page, register, sign_in
from tests.server.gateway.harness import RunningGateway, running_gateway
from tests.server.gateway.upstream import upstream


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def script(gateway: RunningGateway) -> AsyncIterator[Script]:
    script = Script()
    async with upstream(script) as instance:
        await register(gateway, instance)
        yield script


@pytest_asyncio.fixture(loop_scope="session")
async def public(browser: Browser, gateway: RunningGateway, script: Script) -> AsyncIterator[Watched]:
    async with watched(browser, f"{gateway.url}/console") as page:
        yield page
        page.check()


@pytest_asyncio.fixture(loop_scope="session")
async def console(browser: Browser, gateway: RunningGateway, script: Script) -> AsyncIterator[Watched]:
    """The admin port's page, the key typed in."""
    async with watched(browser, admin_page(gateway)) as page:
        await sign_in(page)
        yield page
        page.check()
