"""Forms of the admin's page: publish a checkpoint, compare versions, start a release, make and revoke keys."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import Browser, expect
from safetensors.numpy import save_file

from server.gateway.access.records import KEYS_PREFIX, KeyRecord
from server.gateway.release.records import ReleaseKeys, ReleaseRecord
from tests.server.console.browser import TIMEOUT_MS, Watched, watched
from tests.server.console.play import Script, admin_page, put_versions, sign_in, version_record
from tests.server.gateway.harness import KEYS, MODEL, RunningGateway, new_key
from weightsync import ensure_arena
from weightsync.control.records import VersionRecord

pytestmark = pytest.mark.asyncio(loop_scope="session")
CLIPBOARD = ["clipboard-read", "clipboard-write"]
KEPT = "[document.documentElement.outerHTML, ...Object.values(sessionStorage), document.cookie].join()"


@pytest.fixture
def arena() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hotswap-test-") as name:
        yield Path(name)


def checkpoint(directory: Path, a: float) -> str:
    directory.mkdir()
    save_file({"a": np.full((4, 4), a, np.float32), "b": np.zeros(8, np.float32)}, directory / "model.safetensors")
    return str(directory)


async def click(console: Watched, name: str) -> None:
    await console.page.get_by_role("button", name=name, exact=True).click()


async def test_a_checkpoint_is_published_and_compared_with_the_active_one(
    console: Watched, gateway: RunningGateway, tmp_path: Path, arena: Path
) -> None:
    """With nobody registered a commit is immediate."""
    await asyncio.to_thread(gateway.unregister, "i0")
    await asyncio.to_thread(gateway.store.run, ensure_arena(gateway.store.store, arena))
    page = console.page
    await click(console, "Publish a checkpoint")
    assert await page.evaluate("document.activeElement.name") == "path"
    where = page.get_by_label("Directory on the gateway's host")
    await where.fill("step-1")
    await page.keyboard.press("Enter")
    await console.wait_text("#publish-result", "must be an absolute path on the gateway's host. [400 bad_path]")
    await where.fill(checkpoint(tmp_path / "one", 0.5))
    await page.locator("#publish-dialog").get_by_label("Why").fill("first & only")
    await page.locator("#publish-go").click()
    await console.wait_text("#publish-result", "v1 is published. v1 serves: prepared in")
    await page.locator("#publish-close").click()
    await console.wait_text("#ledger", "first & only")
    await click(console, "Publish a checkpoint")
    await where.fill(checkpoint(tmp_path / "two", 1.5))
    await page.get_by_label("activate it at once").uncheck()
    await page.locator("#publish-go").click()
    await console.wait_text("#publish-result", "v2 is published and ready.")
    await page.locator("#publish-close").click()
    record = VersionRecord.from_json(gateway.store.get(KEYS.version(2)).value)
    assert (record.state, record.tensors) == ("ready", 2)

    await click(console, "Diff of v2 to the active version")
    await console.wait_text("#diff-result", "1 of 2 tensors differ, 16 of 24 elements.")
    (row,) = await page.locator("#diff tbody tr").all_inner_texts()
    assert row.split("\t") == ["a", "changed", "float32", "16", "100.000", "1.00", "1.00", "0"]
    await page.locator("#diff-close").click()
    await asyncio.to_thread(gateway.store.put, KEYS.version(7), version_record(7, slot="elsewhere").to_json())
    await click(console, "Diff of v7 to the active version")
    await console.wait_text("#diff-result", "the version is gone, choose another [422 manifest_error]")
    assert await console.text("#diff tbody") == "No tensor to show."


async def test_a_release_is_started_by_a_policy_that_is_shown(console: Watched, gateway: RunningGateway) -> None:
    assert await console.page.locator("#release-start").is_disabled()
    await asyncio.to_thread(put_versions, gateway, 1, None)
    await expect(console.page.locator("#release-start")).to_be_enabled(timeout=TIMEOUT_MS)
    await click(console, "Start a release")
    await console.wait_text("#release-policy", "traffic: 10, for: 5m")
    assert await console.text("#release-dialog-text") != ""
    assert await console.page.get_by_label("Version").locator("option").all_inner_texts() == ["v2"]
    retired = version_record(2, state="retired").to_json()
    await asyncio.to_thread(gateway.store.put, KEYS.version(2), retired)
    await console.page.locator("#release-go").click()
    await console.wait_text("#release-result", "There is no version 2 that is ready. [404 unknown_version]")
    await asyncio.to_thread(put_versions, gateway, 1, None)
    address = gateway.gateway.default.fleet.instances["i0"].record.address
    await asyncio.to_thread(gateway.register, address, "i1")  # a release takes two
    await console.wait_text("#instances", "i1")
    await console.page.locator("#release-dialog").get_by_label("Why").fill("evals passed")
    await console.page.locator("#release-go").click()
    await console.wait_text("#release-result", "The release of v2 over v1 has begun.")
    record = ReleaseRecord.from_json(gateway.store.get(ReleaseKeys(MODEL).current).value)
    assert (record.version, record.stable) == (2, 1)
    await console.page.locator("#release-close").click()
    await console.wait_text("#ledger", "evals passed")


async def test_a_key_is_made_shown_once_and_revoked(browser: Browser, gateway: RunningGateway, script: Script) -> None:
    async with watched(browser, admin_page(gateway), permissions=CLIPBOARD) as console:
        page = console.page
        await sign_in(console)
        await console.wait_text("#keys-note", "Inference asks for no key")
        await click(console, "Make a key")
        await page.get_by_label("Name").fill("<b>nightly</b>")
        await page.get_by_label("Role").select_option("publisher")
        await page.get_by_label("Ends after, days").fill("0")
        await page.locator("#key-go").click()
        await console.wait_text("#key-result", "[400 ")
        await page.get_by_label("Ends after, days").fill("1")
        await page.locator("#key-go").click()
        await console.wait_text("#key-result", "Keep it now")
        key = await console.text("#new-key")
        await click(console, "Copy")
        await console.wait_text("#key-copy", "Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == key
        items, _ = gateway.store.list(KEYS_PREFIX)
        (record,) = [KeyRecord.from_json(kv.value) for kv in items if not kv.key.endswith(".door")]
        assert record.digest == hashlib.sha256(key.encode()).hexdigest()
        assert (record.scopes, record.expires_at) == (("publisher",), pytest.approx(record.created_at + 86400, abs=5))
        assert key in await page.evaluate(KEPT)
        await page.locator("#key-close").click()
        await expect(page.locator("#new-key")).to_be_empty(timeout=TIMEOUT_MS)
        assert key not in await page.evaluate(KEPT)
        await console.wait_text("#keys", "<b>nightly</b>")
        row = (await page.locator("#keys tbody tr").inner_text()).split("\t")
        assert row[1:4] == [record.id, "publisher", "active"]
        await click(console, "Revoke <b>nightly</b>")
        assert await page.evaluate("document.activeElement.id") == "revoke-close"
        await page.locator("#revoke-go").click()
        await console.wait_text("#revoke-result", "<b>nightly</b> is revoked.")
        await page.locator("#revoke-close").click()
        await console.wait_text("#keys", "revoked")
        await console.wait_text("#ledger", "key_revoke")
        assert KeyRecord.from_json(gateway.store.get(KEYS_PREFIX + record.id).value).revoked_at is not None
        console.check()


async def test_a_viewer_is_told_what_its_key_may_not_do(
    browser: Browser, gateway: RunningGateway, script: Script
) -> None:
    _, header = await new_key(gateway, name="reader", scopes=["viewer"])
    await asyncio.to_thread(put_versions, gateway, 1, None)
    async with watched(browser, admin_page(gateway)) as console:
        await sign_in(console, header.split()[-1])
        page = console.page
        forms = {"publish": "Publish a checkpoint", "key": "Make a key", "revoke": "Revoke reader"}
        forms |= {"release": "Start a release", "diff": "Diff of v2 to the active version"}
        for form, button in forms.items():
            await click(console, button)
            for field in ("path", "name"):
                for box in await page.locator(f"#{form}-dialog input[name={field}]").all():
                    await box.fill("/any")
            if form == "release":
                await console.wait_text("#release-policy", "steps:")
            if form != "diff":
                await page.locator(f"#{form}-go").click()
            await console.wait_text(f"#{form}-result", "[403 ")
            await page.locator(f"#{form}-close").click()
        await console.wait_text("#key-message", "The key works.")
        console.check()
