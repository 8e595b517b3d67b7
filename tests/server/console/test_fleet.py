"""The fleet, its versions, its swaps and the curves of training."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import orjson
import pytest
from playwright.async_api import Browser, expect

from server.gateway.release.records import Counted, EvidenceRecord, ReleaseKeys, ReleaseRecord
from tests.server.console.browser import TIMEOUT_MS, Watched, watched
from tests.server.console.play import (
    ABORTED,
    DONE,
    Script,
    admin_page,
    put_swaps,
    put_versions,
    sign_in,
    version_record,
)
from tests.server.gateway.harness import KEYS, MODEL, RunningGateway
from weightsync.control import chain
from weightsync.control.chain import LedgerEntry
from weightsync.control.records import ActiveRecord, DeviceRecord, PauseRecord, ShareRecord, SplitRecord, SwapRecord

pytestmark = pytest.mark.asyncio(loop_scope="session")
PLACEHOLDER_FITS = """input => {
  const style = getComputedStyle(input), pen = document.createElement("canvas").getContext("2d");
  const arrows = 15, padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  pen.font = style.font;
  return pen.measureText(input.placeholder).width + padding + arrows <= input.clientWidth;
}"""


async def test_the_fleet_is_shown_and_follows(console: Watched, gateway: RunningGateway, script: Script) -> None:
    await console.wait_text("#instances", "SERVING")
    row = await console.page.locator("#instances tbody tr").first.inner_text()
    assert row.split("\t")[:3] == ["i0", "SERVING", "v1"]
    assert row.split("\t")[5] == "good"
    await console.wait_text("#fleet-now", "1 of 1 instances get requests")
    address = gateway.gateway.default.fleet.instances["i0"].record.address
    await asyncio.to_thread(
        gateway.register, address, "i0", "STAGED", staged_version=2, fingerprint="0123456789abcdef", commit_ms=0.625,
        staging_gbps=0.0,
        devices=(DeviceRecord("GPU-8a", 3), DeviceRecord("GPU-51", 2)),
    )  # fmt: skip
    await console.wait_text("#instances", "STAGED")
    cells = await console.page.locator("#instances tbody tr > *").all_inner_texts()
    assert cells[1:5] == ["STAGED", "v1", "v2", "0123456789"]
    assert cells[5:7] == ["good", "3, 2"]
    assert await console.page.locator("#instances tbody td span[title]").get_attribute("title") == "GPU-8a, GPU-51"
    assert "0.63" in cells[-2] or "0.62" in cells[-2]
    assert cells[-3] == "–", "nothing was staged anew"
    await asyncio.to_thread(gateway.unregister, "i0")
    await console.wait_text("#instances", "No instance is registered.")


@pytest.mark.broad
async def test_a_pause_is_shown_and_said(console: Watched, gateway: RunningGateway) -> None:
    assert await console.text("#pause-now") == ""
    await asyncio.to_thread(gateway.store.put, KEYS.pause("p"), PauseRecord("p", "the trainer", 30.0, 1.0).to_json())
    await console.wait_text("#pause-now", "Generation is paused by the trainer")
    await console.wait_text("#announcements", "Generation is paused by the trainer.")
    await asyncio.to_thread(gateway.store.delete, KEYS.pause("p"))
    await console.wait_text("#announcements", "Generation goes on.")
    assert await console.text("#pause-now") == ""


@pytest.mark.broad
async def test_versions_are_listed_with_what_may_be_done(console: Watched, gateway: RunningGateway) -> None:
    await asyncio.to_thread(put_versions, gateway, 1, None)
    await console.wait_text("#active", "v1")
    await console.wait_text("#versions", "active")
    rows = [row.split("\t") for row in await console.page.locator("#versions tbody tr").all_inner_texts()]
    assert [(row[0], row[1]) for row in rows] == [("v3", "retired"), ("v2", "ready"), ("v1", "active")]
    assert rows[0][5] == "123 MB"
    assert await console.page.locator("#versions button").all_inner_texts() == ["Activate", "Diff"]
    assert await console.page.get_by_role("button", name="Activate v2").is_visible()
    assert await console.page.get_by_role("button", name="Roll back").is_disabled()
    await console.wait_text("#active", "v1")


async def test_a_version_is_activated_from_the_dialog_by_keyboard_alone(
    console: Watched, gateway: RunningGateway
) -> None:
    """With nobody registered a commit is immediate; the coordinator of this gateway makes it, and it is done when an
    instance runs the version."""
    address = gateway.gateway.default.fleet.instances["i0"].record.address
    await asyncio.to_thread(gateway.unregister, "i0")
    await asyncio.to_thread(put_versions, gateway, 1, None)
    page = console.page
    button = page.get_by_role("button", name="Activate v2")
    await button.wait_for()
    assert await console.text("#rollback-note") == "no version served before v1"
    await button.focus()
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Activate v2?")
    await dialog.wait_for()
    assert await page.evaluate("document.activeElement.id") == "swap-close"  # Enter by mistake swaps nothing
    await page.keyboard.press("Escape")
    await dialog.wait_for(state="hidden")
    assert await button.evaluate("b => b === document.activeElement")
    await page.keyboard.press("Enter")
    await dialog.wait_for()
    await page.get_by_label("rolling").focus()
    await page.keyboard.press("Space")
    await dialog.get_by_label("Why").focus()
    await page.keyboard.type("fewer errors & shorter")
    await page.get_by_role("button", name="Activate", exact=True).focus()
    await page.keyboard.press("Enter")
    await console.wait_text("#swap-result", "v2 serves: prepared in")
    await page.keyboard.press("Enter")  # on Close, which has the focus
    await dialog.wait_for(state="hidden")
    await console.wait_text("#active", "v2")
    await asyncio.to_thread(gateway.register, address, "i0", active_version=2, active_epoch=2)
    await console.wait_text("#swaps", "done")
    await console.wait_text("#announcements", "Weight version 2 serves now.")
    await console.wait_text("#ledger", "fewer errors & shorter")
    assert "v2 done" in (await page.locator("#timeline svg").get_attribute("aria-label") or "")


async def test_a_version_is_given_a_share_with_the_slider(console: Watched, gateway: RunningGateway) -> None:
    """One instance serves here, which is too few: the dialog says how many it takes. Then another gateway makes one."""
    await asyncio.to_thread(put_versions, gateway, 1, 3)
    await console.wait_text("#active", "v1")  # a share is of what the active version has
    note = "v3, which served before, is no longer held: activate one that is ready"
    assert await console.text("#rollback-note") == note
    page = console.page
    await page.get_by_role("button", name="Activate v2").click()
    slider = page.get_by_label("Requests it gets")
    assert await slider.input_value() == "100"
    assert await slider.evaluate("s => getComputedStyle(s).paddingRight") == "0px", "or it stops short of its end"
    for name in ("Let streams end for", "Time to stage"):
        assert await page.get_by_label(name).evaluate(PLACEHOLDER_FITS)
    await slider.press("ArrowLeft")
    assert await console.text("#swap-share") == "99 %"
    await page.locator("#swap-go").click()
    await console.wait_text("#swap-result", "[409 not_enough_instances]")
    assert "share the traffic of 2 instances" in await console.text("#swap-result")
    await page.get_by_role("button", name="Close").click()
    report = {"version": 1, "split": {"shares": [{"version": 2, "percent": 99}]}, "prepare_ms": 1.0, "commit_ms": 1.0}
    await page.route("**/admin/weights/split*", lambda route: route.fulfill(json=report))
    await page.get_by_role("button", name="Activate v2").click()
    await page.get_by_label("Requests it gets").press("ArrowLeft")
    await page.locator("#swap-go").click()
    await console.wait_text("#swap-result", "v2 beside v1 (99 % of the requests) serves: prepared in")
    await page.get_by_role("button", name="Close").click()
    split = SplitRecord((ShareRecord(2, 12.5, ("i1",)),), "key", 2)
    await asyncio.to_thread(gateway.store.put, KEYS.active, ActiveRecord(1, 2, None, "s", 1.0, split=split).to_json())
    await console.wait_text("#versions", "12.5 %")
    rows = [row.split("\t")[:2] for row in await page.locator("#versions tbody tr").all_inner_texts()]
    assert rows == [["v3", "retired"], ["v2", "ready 12.5 %"], ["v1", "active 87.5 %"]]
    await console.wait_text("#rollback-note", "v2 beside v1 (12.5 % of the requests): “Activate v1” ends that")
    await page.get_by_role("button", name="Activate v1").click()
    await console.wait_text("#swap-dialog-text", "Now v2 beside v1 (12.5 % of the requests) serves.")


@pytest.mark.broad
async def test_a_roll_back_that_is_refused_says_why(console: Watched, gateway: RunningGateway) -> None:
    await asyncio.to_thread(put_versions, gateway, 2, 1)
    button = console.page.get_by_role("button", name="Roll back", exact=True)
    await console.wait_text("#rollback-note", "to v1")
    await button.click()
    retired = version_record(1, state="retired").to_json()
    await asyncio.to_thread(gateway.store.put, KEYS.version(1), retired)
    await console.page.locator("#swap-go").click()
    await console.wait_text("#swap-result", "[404 unknown_version]")
    await console.page.get_by_role("button", name="Close").click()


async def test_a_swap_under_way_shows_its_progress(console: Watched, gateway: RunningGateway) -> None:
    """No instance stages here: the swap stands in its first phase until it is given up."""
    await asyncio.to_thread(put_versions, gateway, 1, None)
    await console.page.get_by_role("button", name="Activate v2").click()
    await console.page.get_by_label("Time to stage").fill("8")  # in which the page must look once
    await console.page.locator("#swap-go").click()
    await console.wait_text("#swap-progress", "v2, staging: 0 of 1 staged")
    await console.wait_text("#swap-result", "[409 swap_aborted]")
    await console.wait_text("#swaps", "aborted")
    assert "not staged within 8 s by i0" in await console.text("#swaps")


async def test_a_swap_says_which_versions_serve_beside_which(console: Watched, gateway: RunningGateway) -> None:
    alone = replace(DONE, version=1, previous=None)
    two = replace(alone, split=SplitRecord((ShareRecord(2, 10.0),)))
    three = replace(alone, split=SplitRecord((ShareRecord(2, 12.5, shadow=50.0), ShareRecord(3, 0.0))))
    other = replace(DONE, version=2, previous=1, split=SplitRecord((ShareRecord(1, 10.0),)))
    swaps = [alone, two, three, replace(ABORTED, version=3, previous=1), alone, other]
    for number, record in enumerate(swaps):
        await asyncio.to_thread(gateway.store.put, KEYS.past_swap(number), replace(record, id=f"s{number}").to_json())
    moved = SwapRecord("s5", 2, "aborted", (), 1.0, 1.0)
    await asyncio.to_thread(gateway.store.put, KEYS.swap, moved.to_json())
    await console.wait_text("#swaps", "v1 beside v2 (10 % of the requests)")
    rows = await console.page.locator("#swaps tbody tr").all_inner_texts()
    shared = "v2 and v3 beside v1 (12.5 % and 0 % of the requests, 50 % and 0 % repeated)"
    assert [row.split("\t")[1:4] for row in rows] == [
        ["v1 beside v2 (10 % of the requests)", "v1", "done"],
        ["v1", shared, "done"],
        ["v3", shared, "aborted"],
        [shared, "v2 beside v1 (10 % of the requests)", "done"],
        ["v2 beside v1 (10 % of the requests)", "v1", "done"],
        ["v1", "–", "done"],
    ]
    marks = await console.page.locator("#timeline g text").all_text_contents()
    assert marks == ["v1", "+v2", "+v2+v3", "v3", "v1", "+v1"]
    label = await console.page.locator("#timeline svg").get_attribute("aria-label") or ""
    assert "the last: v1 beside v2 (10 % of the requests) done" in label


@pytest.mark.broad
async def test_the_timeline_tells_all_of_a_swap(console: Watched, gateway: RunningGateway) -> None:
    await asyncio.to_thread(put_swaps, gateway)
    moved = SwapRecord("y", 3, "aborted", (), 1.0, 1.0)
    await asyncio.to_thread(gateway.store.put, KEYS.swap, moved.to_json())
    await console.wait_text("#swaps", "rolling")
    newest, oldest = [r.split("\t")[1:] for r in await console.page.locator("#swaps tbody tr").all_inner_texts()]
    assert oldest[:4] == ["v2", "v1", "done", "rolling"]
    assert oldest[4:8] == ["0.75", "250", "50.0", "fingerprint verified; probe passed"]
    assert oldest[8] == "a (stall 0.50 ms, 1.50 GB/s, steps 12 % longer meanwhile); b (stall 0.75 ms, 1.60 GB/s)"
    assert newest[-1] == "a byte <b>flipped</b> (tensor t.w)"
    for shape in ("circle.stall", "path.prepare", "rect.commit", "path.aborted"):
        assert await console.page.locator(f"#timeline {shape}").count() >= 1


@pytest.mark.broad
async def test_curves_are_drawn_and_told_in_words_and_numbers(console: Watched, gateway: RunningGateway) -> None:
    points = {
        KEYS.training_point(s): {"step": s, "time": float(s), "reward": s / 10, "loss": 2.0 / s} for s in range(1, 6)
    }
    for key, point in points.items():
        await asyncio.to_thread(gateway.store.put, key, orjson.dumps(point))
    await console.wait_attribute("#reward svg", "aria-label", "step 5")
    label = await console.page.locator("#reward svg").get_attribute("aria-label")
    assert "reward: now 0.50, between 0.10 and 0.50" in (label or "")
    await console.page.locator("#loss summary").click()
    await console.page.locator("#loss tbody tr").first.wait_for()
    rows = await console.page.locator("#loss tbody tr").all_inner_texts()
    assert rows[0].split("\t") == ["step 5", "0.4000"]
    await console.wait_attribute("#throughput svg", "aria-label", "tokens/s: now")


async def test_a_store_or_gateway_that_is_away_is_told_and_got_over(
    browser: Browser, gateway: RunningGateway, script: Script
) -> None:
    async with watched(browser, admin_page(gateway)) as page:
        await sign_in(page)
        await page.page.context.set_offline(True)
        await page.wait_text("#key-message", "does not answer")
        await page.page.context.set_offline(False)
        await page.wait_text("#key-message", "The key works.")
        page.faults.clear()  # Chromium notes each request it could not send


@pytest.mark.broad
async def test_curves_of_what_does_not_vary_are_drawn_all_the_same(console: Watched, gateway: RunningGateway) -> None:
    for slot, step in enumerate((4.0, 5.0)):
        point = {"step": step, "time": float(slot), "reward": 0.0, "loss": -1.5}
        await asyncio.to_thread(gateway.store.put, KEYS.training_point(slot), orjson.dumps(point))
    await console.wait_attribute("#reward svg", "aria-label", "reward: now 0.00, between 0.00 and 0.00")
    for figure in ("#reward", "#loss"):
        drawn = await console.page.locator(f"{figure} svg path").first.get_attribute("d") or ""
        assert re.fullmatch(r"M[\d. -]+L[\d. -]+", drawn), drawn


async def test_a_release_is_shown_with_its_conditions_and_taken_back(console: Watched, gateway: RunningGateway) -> None:
    await console.wait_text("#release-now", "No version was released yet.")
    text = "steps: [{traffic: 50, for: 30m, conditions: [{metric: errors, max: 0.1}]}, {traffic: 100, for: 1h}]"
    record = ReleaseRecord("r", 2, 1, text, "held", 0, 1.0, 1.0, "ops", "errors max 0.1: 0 of 100 answers")
    keys = ReleaseKeys(MODEL)
    counted = EvidenceRecord((Counted("errors", "live", 2, 40, 1.0, 1.0),))
    await asyncio.to_thread(gateway.store.put, f"{keys.evidence_of('r', 0)}g", counted.to_json())
    split = SplitRecord((ShareRecord(2, 50.0),))
    active = ActiveRecord(1, 1, None, "first", 0.0, split=split)
    await asyncio.to_thread(put_versions, gateway, 1, None)
    await asyncio.to_thread(gateway.store.put, KEYS.active, active.to_json())
    judged = replace(record, state="judging", since=time.time(), reason="")
    await asyncio.to_thread(gateway.store.put, keys.current, judged.to_json())
    await console.wait_text("#release-steps [aria-current]", "50 %, 30 min left")
    await console.wait_text("#rollback-note", "v2 is being released over v1: “Take it back” ends that")
    await console.wait_text("#release-brief", "Release of v2, over v1: step 1 of 2, 50 % of the requests, judging")
    assert await console.page.locator("#release-steps li").all_inner_texts() == ["50 %, 30 min left", "100 %"]
    await asyncio.to_thread(gateway.store.put, keys.current, record.to_json())
    await console.wait_text("#release-now", "v2, over v1: step 1 of 2, 50 % of the requests, held: errors max 0.1")
    row = (await console.page.locator("#findings tbody tr").first.inner_text()).split("\t")
    assert row[:2] == ["errors max 0.1", "blind"]
    assert row[4] == "40 of 100 answers of the candidate"
    await asyncio.to_thread(gateway.store.put, KEYS.version(3), version_record(3).to_json())
    await asyncio.to_thread(gateway.store.put, KEYS.active, replace(active, previous=3, epoch=2).to_json())
    await console.wait_text("#rollback-note", "to v3, which served before; it ends the release of v2")
    await console.page.click("#release-cancel")
    await console.wait_text("#release-now", "cancelled by admin key")
    await expect(console.page.locator("#release-brief")).to_be_hidden(timeout=TIMEOUT_MS)


async def test_the_ledger_shows_who_did_what_and_why(console: Watched, gateway: RunningGateway) -> None:
    entry = LedgerEntry("rollback", "key <b>ops</b> (1)", version=7, reason="worse & slower")
    await asyncio.to_thread(gateway.store.run, chain.append(gateway.store.store, {}, {}, entry))
    await console.wait_text("#ledger", "worse & slower")
    row = (await console.page.locator("#ledger tbody tr").first.inner_text()).split("\t")
    assert [row[0], *row[2:6]] == ["1", "rollback", "key <b>ops</b> (1)", "version 7", "worse & slower"]
