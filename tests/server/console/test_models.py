"""The console of a gateway with several models: the page shows the one that is chosen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Browser

from tests.server.console.browser import watched
from tests.server.console.play import Script, admin_page, sign_in
from tests.server.gateway.harness import running_gateway
from tests.server.gateway.upstream import upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_model_is_chosen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [{name: small}, {name: big}]\n")
    script = Script()
    async with upstream(script) as up:
        with running_gateway(tmp_path, model="", models=file, run_coordinator=False) as gateway:
            await asyncio.to_thread(gateway.register, up, "of-small", model="small")
            await asyncio.to_thread(gateway.register, up, "of-big", model="big")
            async with watched(browser, admin_page(gateway)) as page:
                await sign_in(page)
                await page.wait_text("#instances", "of-small")
                assert "of-big" not in await page.text("#instances")
                await page.page.select_option("#model-choice", "big")
                await page.wait_text("#instances", "of-big")
                assert "of-small" not in await page.text("#instances")
                await page.page.fill("#question", "hello")
                await page.page.click("#send")
                await page.wait_text("#chat-log", "Hello there.")
                assert script.bodies[-1]["model"] == "big"
                page.check()
