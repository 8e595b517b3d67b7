"""The console in a real Chromium, before a real gateway and an instance that plays its part by script."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from playwright.async_api import Browser

from server.gateway import UpstreamSettings
from tests.server.browser import Watched, chromium, lacking, watched
from tests.server.gateway_harness import ADMIN_KEY, KEYS, MODEL, RunningGateway, running_gateway
from tests.server.gateway_upstream import Link, Received, Upstream, upstream
from tests.server.test_sdk_js_live import JS, tools
from weightsync.records import ActiveRecord, FlipRecord, PastSwapRecord, PauseRecord, SwapRecord, VersionRecord

pytestmark = pytest.mark.asyncio(loop_scope="module")

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b> [a](javascript:alert(3)) &amp;"


@dataclass
class Script:
    """What the instance answers to the next chats: pieces with the version that wrote each."""

    pieces: list[tuple[str, int]] = field(default_factory=lambda: [("Hello", 1), (" there.", 1)])
    gate: asyncio.Event | None = None  # waited for before the last piece
    template: bool = True
    error: dict[str, Any] | None = None
    cut: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the client left in the middle
    bodies: list[dict[str, Any]] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)

    async def __call__(self, link: Link, received: Received) -> None:
        if received.target == "/v1/models":
            await link.json(orjson.dumps({"object": "list", "data": [{"id": MODEL}]}))
        elif received.target in ("/v1/chat/completions", "/generate"):
            self.bodies.append(orjson.loads(received.body))
            self.policies += [v for k, v in received.headers.items() if k == "x-hotswap-policy"]
            await self._answer(link, chat=received.target != "/generate")
        else:
            await link.json()

    async def _answer(self, link: Link, *, chat: bool) -> None:
        if self.error is not None:
            await link.json(orjson.dumps({"error": self.error}), status=b"409 Conflict")
        elif chat and not self.template:
            message = "As of transformers v4.44, default chat template is no longer allowed."
            error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
            await link.json(orjson.dumps({"error": error}), status=b"400 Bad Request")
        else:
            await self._stream(link, chat=chat)

    async def _stream(self, link: Link, *, chat: bool) -> None:
        await link.sse_head()
        for at, (text, version) in enumerate(self.pieces):
            if self.gate is not None and at == len(self.pieces) - 1:
                await self._wait(link)
            await link.chunk(piece(text, version, chat=chat))
        if self.cut:
            link.cut()
            return
        await link.chunk(ending(self.pieces, chat=chat))
        await link.end()

    async def _wait(self, link: Link) -> None:
        assert self.gate is not None
        opened = asyncio.create_task(self.gate.wait())
        left = asyncio.create_task(link.gone())
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            self.gone.set()
        for task in (opened, left):
            task.cancel()


def piece(text: str, version: int, *, chat: bool) -> bytes:
    if not chat:
        told = {"index": 0, "text": text, "token_ids": [1], "weight_version": version}
        return b"event: token\ndata: %b\n\n" % orjson.dumps(told)
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: %b\n\n" % orjson.dumps({"choices": [choice], "weight_version": version})


def ending(pieces: list[tuple[str, int]], *, chat: bool) -> bytes:
    spans: list[dict[str, int]] = []
    for at, (_, version) in enumerate(pieces):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    prompt = [{"version": pieces[0][1], "start": 0, "end": 5}]
    choice = {"index": 0, "finish_reason": "stop", "weight_versions": spans, "prompt_weight_versions": prompt}
    usage = {"prompt_tokens": 5, "completion_tokens": len(pieces), "total_tokens": 5 + len(pieces)}
    if not chat:
        return b"event: done\ndata: %b\n\n" % orjson.dumps({"choices": [choice], "usage": usage})
    last = orjson.dumps({"choices": [{**choice, "delta": {}}]})
    return b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (last, orjson.dumps({"choices": [], "usage": usage}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def script(gateway: RunningGateway) -> AsyncIterator[Script]:
    script = Script()
    async with upstream(script) as instance:
        await register(gateway, instance)
        yield script


@pytest_asyncio.fixture(loop_scope="module")
async def public(browser: Browser, gateway: RunningGateway, script: Script) -> AsyncIterator[Watched]:
    async with watched(browser, f"{gateway.url}/console") as page:
        yield page
        page.check()


@pytest_asyncio.fixture(loop_scope="module")
async def console(browser: Browser, gateway: RunningGateway, script: Script) -> AsyncIterator[Watched]:
    """The admin port's page, the key typed in."""
    async with watched(browser, admin_page(gateway)) as page:
        await sign_in(page)
        yield page
        page.check()


async def register(gateway: RunningGateway, instance: Upstream, **fields: Any) -> None:
    await asyncio.to_thread(gateway.register, instance, **fields)


def admin_page(gateway: RunningGateway) -> str:
    return f"http://{gateway.host}:{gateway.admin_port}/console"


async def sign_in(page: Watched, key: str = ADMIN_KEY) -> None:
    await page.page.get_by_label("Admin key").fill(key)
    await page.page.get_by_role("button", name="Use key").click()
    await page.wait_text("#key-message", "The key works.")


async def ask(page: Watched, text: str = "Hi") -> None:
    await page.page.get_by_label("Your message").fill(text)
    await page.page.get_by_role("button", name="Send").click()


async def answered(page: Watched) -> None:
    await page.wait_attribute("#chat-log", "aria-busy", "^false$")


def version_record(version: int, **fields: Any) -> VersionRecord:
    known: dict[str, Any] = {
        "state": "ready", "slot": "", "nbytes": 123_456_789, "manifest_digest": "d", "base": None, "step": version,
        "publisher": "trainer", "token": 1, "created_at": 1.7e9, "source": "test", "tensors": 1,
        "fingerprint": f"feedbeef{version:08d}",
    }  # fmt: skip
    return VersionRecord(version=version, **{**known, **fields})


# the chat


async def test_an_answer_streams_with_its_version_and_its_times(public: Watched, script: Script) -> None:
    await public.wait_text("#model", MODEL)
    await ask(public, "What is this?")
    await answered(public)
    assert await public.text("#chat-log .message:last-child .text") == "Hello there."
    facts = await public.text("#chat-log .message:last-child .facts")
    for told in ("written by v1", "first token after", "2 tokens", "prompt read by v1", "ended by stop"):
        assert told in facts
    assert await public.text("#legend") == "v1 2 tokens"
    (body,) = script.bodies
    assert body["messages"] == [{"role": "user", "content": "What is this?"}]
    assert (body["model"], body["max_tokens"], body["stream"]) == (MODEL, 256, True)
    assert "hotswap" not in body


async def test_a_conversation_goes_on_and_can_be_cleared(public: Watched, script: Script) -> None:
    for text in ("One", "Two"):
        await ask(public, text)
        await answered(public)
    assert [m["content"] for m in script.bodies[1]["messages"]] == ["One", "Hello there.", "Two"]
    await public.page.get_by_role("button", name="Clear").click()
    assert await public.text("#chat-log") == ""
    await ask(public, "Three")
    await answered(public)
    assert [m["content"] for m in script.bodies[2]["messages"]] == ["Three"]


async def test_a_swap_in_the_middle_changes_colour_and_mark(public: Watched, script: Script) -> None:
    script.pieces = [("The", 6), (" old", 6), (" and", 7), (" the new", 7)]
    await ask(public)
    await answered(public)
    runs = public.page.locator("#chat-log .run")
    assert await runs.all_text_contents() == ["The old", " and the new"]
    assert [await run.get_attribute("data-version") for run in await runs.all()] == ["v6", "v7"]
    looks = await runs.evaluate_all(
        "runs => runs.map(r => { const s = getComputedStyle(r), b = getComputedStyle(r, '::before');"
        " return [s.backgroundColor, s.textDecorationStyle, b.content]; })"
    )
    assert looks[0][0] != looks[1][0]
    assert looks[0][1] != looks[1][1]  # colour is not the only sign
    assert [look[2] for look in looks] == ['"v6"', '"v7"']
    assert await public.text("#legend") == "v6 2 tokensv7 2 tokens"
    assert "v6: 0–2, v7: 2–4" in await public.text("#chat-log .facts")
    assert "From here on weight version 7 answers." in await public.text("#announcements")


async def test_what_the_model_writes_is_text_and_never_markup(public: Watched, script: Script) -> None:
    script.pieces = [(MARKUP[:20], 1), (MARKUP[20:], 2)]
    await ask(public, MARKUP)
    await answered(public)
    texts = public.page.locator("#chat-log .text")
    assert await texts.all_text_contents() == [MARKUP, MARKUP]
    assert await public.page.locator("#chat-log :is(img, script, b, a)").count() == 0


async def test_an_error_that_holds_markup_is_text_too(public: Watched, script: Script) -> None:
    script.error = {"message": f"No. {MARKUP}", "type": "conflict_error", "param": None, "code": "version_unavailable"}
    await ask(public)
    await answered(public)
    error = await public.text("#chat-log .error")
    assert error == f"No. {MARKUP} [409 version_unavailable]"
    assert await public.page.locator("#chat-log :is(img, script, b, a)").count() == 0
    script.error = None
    await ask(public, "Again")
    await answered(public)
    assert script.bodies[-1]["messages"] == [{"role": "user", "content": "Again"}]


async def test_stop_ends_the_request_at_the_instance(public: Watched, script: Script) -> None:
    script.gate = asyncio.Event()
    await ask(public)
    await public.wait_text("#chat-log .run", "Hello")
    await public.page.get_by_role("button", name="Stop").click()
    await answered(public)
    await asyncio.wait_for(script.gone.wait(), 20)
    assert "stopped" in await public.text("#chat-log .facts")
    assert await public.page.get_by_role("button", name="Stop").is_disabled()
    assert await public.page.evaluate("document.activeElement.id") == "question"


async def test_a_stream_that_is_cut_is_no_complete_answer(public: Watched, script: Script) -> None:
    script.cut, script.gate = True, asyncio.Event()
    await ask(public)
    await public.wait_text("#chat-log .run", "Hello")
    script.gate.set()
    await public.page.wait_for_selector("#chat-log .error")
    error = await public.text("#chat-log .error")
    assert "[incomplete]" in error or "[upstream_died]" in error
    public.faults.clear()  # Chromium notes the connection that broke
    assert (await public.text("#chat-log .run")).startswith("Hello")  # what came stays


async def test_a_model_without_a_chat_template_is_asked_as_plain_text(public: Watched, script: Script) -> None:
    script.template = False
    for text in ("Once upon", "And then"):
        await ask(public, text)
        await answered(public)
    assert await public.page.locator("#chat-log .message:not(.mine) .text").all_text_contents() == ["Hello there."] * 2
    assert "no chat template" in await public.text("#chat-notice")
    chat, first, second = script.bodies
    assert "messages" in chat
    assert (first["prompt"], second["prompt"]) == ("Once upon", "And then")


async def test_what_a_swap_is_to_do_is_asked_for(public: Watched, script: Script) -> None:
    await public.page.get_by_label("If the weights change").select_option("finish")
    await public.page.get_by_label("Tokens at most").fill("7")
    await public.page.get_by_label("go on past the end").check()
    await ask(public)
    await answered(public)
    assert (script.bodies[0]["max_tokens"], script.bodies[0]["ignore_eos"]) == (7, True)
    assert b"hotswap" not in orjson.dumps(script.bodies)  # the gateway takes it out and sends it as a header
    assert script.policies == ["finish"]


async def test_no_instance_is_a_typed_error(browser: Browser, tmp_path: Path) -> None:
    with running_gateway(tmp_path, upstream=UpstreamSettings(hold_s=0)) as gateway:
        async with watched(browser, f"{gateway.url}/console") as page:
            await ask(page)
            await answered(page)
            assert "[503 no_instance]" in await page.text("#chat-log .error")
            page.check()


async def test_the_public_page_asks_for_nothing_of_the_fleet(public: Watched) -> None:
    await ask(public)
    await answered(public)
    assert not [r.url for r in public.requests if "/admin" in r.url]
    assert await public.page.locator("#instances, #versions, #swaps, dialog").count() == 0


# keys


async def test_the_key_travels_in_a_header_and_is_forgotten_with_the_page(console: Watched) -> None:
    asked = [r for r in console.requests if "/admin/" in r.url]
    assert asked
    for request in asked:
        assert (await request.all_headers())["authorization"] == f"Bearer {ADMIN_KEY}"
        assert "cookie" not in await request.all_headers()
    assert all(ADMIN_KEY not in request.url for request in console.requests)
    kept = "[...Object.values(localStorage), ...Object.values(sessionStorage), document.cookie].join()"
    assert ADMIN_KEY not in await console.page.evaluate(kept)
    assert await console.page.get_by_label("Admin key").input_value() == ""
    await console.page.reload()
    await console.wait_text("#key-message", "Type the admin key")


async def test_the_key_is_kept_for_the_tab_if_so_wished_until_it_is_forgotten(console: Watched) -> None:
    await console.page.get_by_label("keep it for this tab").check()
    await sign_in(console)
    await console.page.reload()
    await console.wait_text("#key-message", "The key works.")
    await console.page.get_by_role("button", name="Forget key").click()
    await console.wait_text("#key-message", "Type the admin key")
    await console.wait_text("#instances", "No instance")  # nothing it showed is left
    assert await console.page.evaluate("sessionStorage.length") == 0


async def test_a_wrong_key_shows_nothing_and_is_not_sent_again(browser: Browser, gateway: RunningGateway) -> None:
    async with watched(browser, admin_page(gateway)) as page:
        await page.page.get_by_label("Admin key").fill("wrong-wrong-wrong-wrong")
        await page.page.keyboard.press("Enter")
        await page.wait_text("#key-message", "[401 invalid_api_key]")
        asked = len([r for r in page.requests if "/admin/" in r.url])
        assert asked <= 4  # one round
        await page.page.wait_for_timeout(2500)  # two more would have come by now
        assert len([r for r in page.requests if "/admin/" in r.url]) == asked
        assert await page.page.locator("#instances tbody tr").count() == 1
        assert "No instance" in await page.text("#instances")
        page.check()


# fleet, versions, swaps


async def test_the_fleet_is_shown_and_follows(console: Watched, gateway: RunningGateway, script: Script) -> None:
    await console.wait_text("#instances", "SERVING")
    row = await console.page.locator("#instances tbody tr").first.inner_text()
    assert row.split("\t")[:3] == ["i0", "SERVING", "v1"]
    address = gateway.gateway.fleet.instances["i0"].record.address
    await asyncio.to_thread(
        gateway.register, address, "i0", "STAGED", staged_version=2, fingerprint="0123456789abcdef", commit_ms=0.625
    )
    await console.wait_text("#instances", "STAGED")
    cells = await console.page.locator("#instances tbody tr > *").all_inner_texts()
    assert cells[1:5] == ["STAGED", "v1", "v2", "0123456789"]
    assert "0.63" in cells[-2] or "0.62" in cells[-2]
    await asyncio.to_thread(gateway.unregister, "i0")
    await console.wait_text("#instances", "No instance is registered.")


async def test_a_pause_is_shown_and_said(console: Watched, gateway: RunningGateway) -> None:
    assert await console.text("#pause-now") == ""
    await asyncio.to_thread(gateway.store.put, KEYS.pause("p"), PauseRecord("p", "the trainer", 30.0, 1.0).to_json())
    await console.wait_text("#pause-now", "Generation is paused by the trainer")
    await console.wait_text("#announcements", "Generation is paused by the trainer.")
    await asyncio.to_thread(gateway.store.delete, KEYS.pause("p"))
    await console.wait_text("#announcements", "Generation goes on.")
    assert await console.text("#pause-now") == ""


def put_versions(gateway: RunningGateway, active: int, previous: int | None) -> None:
    for version in (1, 2, 3):
        state = "retired" if version == 3 else "ready"
        gateway.store.put(KEYS.version(version), version_record(version, state=state).to_json())
    record = ActiveRecord(active, 1, previous, "s", 1.0)
    gateway.store.put(KEYS.active, record.to_json())


async def serve_version(gateway: RunningGateway, version: int) -> None:
    """The instance runs what is committed, so it is asked."""
    address = gateway.gateway.fleet.instances["i0"].record.address
    await asyncio.to_thread(gateway.register, address, "i0", active_version=version)


async def test_versions_are_listed_with_what_may_be_done(console: Watched, gateway: RunningGateway) -> None:
    await asyncio.to_thread(put_versions, gateway, 1, None)
    await console.wait_text("#active", "v1")
    await console.wait_text("#versions", "active")
    rows = [row.split("\t") for row in await console.page.locator("#versions tbody tr").all_inner_texts()]
    assert [(row[0], row[1]) for row in rows] == [("v3", "retired"), ("v2", "ready"), ("v1", "active")]
    assert rows[0][5] == "123 MB"
    assert await console.page.locator("#versions button").all_inner_texts() == ["Activate"]
    assert await console.page.get_by_role("button", name="Activate v2").is_visible()
    assert await console.page.get_by_role("button", name="Roll back").is_disabled()
    await console.wait_text("#active", "v1")


async def test_a_version_is_activated_from_the_dialog_by_keyboard_alone(
    console: Watched, gateway: RunningGateway
) -> None:
    """With nobody registered a commit is immediate; the coordinator of this gateway makes it."""
    await asyncio.to_thread(gateway.unregister, "i0")
    await asyncio.to_thread(put_versions, gateway, 1, None)
    page = console.page
    button = page.get_by_role("button", name="Activate v2")
    await button.wait_for()
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
    await page.get_by_role("button", name="Activate", exact=True).focus()
    await page.keyboard.press("Enter")
    await console.wait_text("#swap-result", "v2 serves")
    await page.keyboard.press("Enter")  # on Close, which has the focus
    await dialog.wait_for(state="hidden")
    await console.wait_text("#active", "v2")
    await console.wait_text("#swaps", "done")
    await console.wait_text("#announcements", "Weight version 2 serves now.")
    assert "v2 done" in (await page.locator("#timeline svg").get_attribute("aria-label") or "")


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
    """Nobody stages here: the swap stands in its first phase until it is given up."""
    await asyncio.to_thread(put_versions, gateway, 1, None)
    await console.page.get_by_role("button", name="Activate v2").click()
    await console.page.get_by_label("Time to stage").fill("4")
    await console.page.locator("#swap-go").click()
    await console.wait_text("#swap-progress", "v2, staging: 0 of 1 staged")
    await console.wait_text("#swap-result", "[409 swap_aborted]")
    await console.wait_text("#swaps", "aborted")
    assert "not staged within 4 s by i0" in await console.text("#swaps")


async def test_the_timeline_tells_all_of_a_swap(console: Watched, gateway: RunningGateway) -> None:
    flips = (FlipRecord("a", 2, "ff", 90.0, 1.5, 0.5), FlipRecord("b", 2, "ff", 80.0, 1.6, 0.75))
    done = PastSwapRecord(
        "x", 2, "done", "rolling", 1.0, 1.3, 1.25, 2, 1, canary="a", probe="passed", verified=True, flips=flips
    )
    lost = PastSwapRecord(
        "y", 3, "aborted", "together", 2.0, 2.5, previous=2, reason="a byte <b>flipped</b>", tensor="t.w"
    )
    for number, record in ((1, done), (2, lost)):
        await asyncio.to_thread(gateway.store.put, KEYS.past_swap(number), record.to_json())
    moved = SwapRecord("y", 3, "aborted", (), 1.0, 1.0)
    await asyncio.to_thread(gateway.store.put, KEYS.swap, moved.to_json())
    await console.wait_text("#swaps", "rolling")
    newest, oldest = [r.split("\t")[1:] for r in await console.page.locator("#swaps tbody tr").all_inner_texts()]
    assert oldest[:4] == ["v2", "v1", "done", "rolling"]
    assert oldest[4:8] == ["0.75", "250", "50.0", "fingerprint verified; probe passed"]
    assert oldest[8] == "a (stall 0.50 ms, 1.50 GB/s); b (stall 0.75 ms, 1.60 GB/s)"
    assert newest[-1] == "a byte <b>flipped</b> (tensor t.w)"
    for shape in ("circle.stall", "path.prepare", "rect.commit", "path.aborted"):
        assert await console.page.locator(f"#timeline {shape}").count() >= 1


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


# what everybody must be able to do


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core's script, installed as the lock file of tests/js says."""
    found = tools()
    if found is None:
        lacking("node and npm are not installed; see requirements/dev.txt")
    directory = tmp_path_factory.mktemp("axe")
    for name in ("package.json", "package-lock.json"):
        (directory / name).write_text((JS / name).read_text())
    command = [*found[1], "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"]
    install = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=240)
    if install.returncode:
        lacking(f"npm could not install axe-core: {install.stderr[-500:]}")
    return (directory / "node_modules" / "axe-core" / "axe.min.js").read_text()


async def violations(page: Watched, axe: str) -> list[str]:
    await page.page.evaluate(axe)
    found = await page.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{v['id']}: {n['html']} {n['failureSummary']}" for v in found["violations"] for n in v["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(
    browser: Browser, gateway: RunningGateway, script: Script, axe: str, scheme: Any
) -> None:
    script.pieces = [(f"word{v} ", v) for v in range(1, 13)]  # every tint twice
    await asyncio.to_thread(put_versions, gateway, 2, 1)
    await serve_version(gateway, 2)
    flips = (FlipRecord("a", 2, "ff", 90.0, 1.5, 0.5),)
    past = PastSwapRecord("x", 2, "done", "together", 1.0, 1.3, 1.25, 2, 1, verified=True, flips=flips)
    await asyncio.to_thread(gateway.store.put, KEYS.past_swap(1), past.to_json())
    for step in (1, 2):
        point = {"step": step, "time": float(step), "reward": step / 4, "loss": 1.0}
        await asyncio.to_thread(gateway.store.put, KEYS.training_point(step), orjson.dumps(point))
    async with watched(browser, admin_page(gateway), color_scheme=scheme, reduced_motion="reduce") as page:
        await sign_in(page)
        await page.wait_text("#swaps", "done")
        await page.page.wait_for_selector("#reward svg path")
        await ask(page)
        await answered(page)
        assert await violations(page, axe) == []
        await page.page.get_by_role("button", name="Roll back", exact=True).click()
        assert await violations(page, axe) == []
        page.check()
    async with watched(browser, f"{gateway.url}/console", color_scheme=scheme) as page:
        await ask(page)
        await answered(page)
        assert await violations(page, axe) == []
        page.check()


async def test_all_of_it_is_done_by_keyboard(browser: Browser, gateway: RunningGateway, script: Script) -> None:
    await asyncio.to_thread(put_versions, gateway, 2, 1)
    await serve_version(gateway, 2)
    async with watched(browser, admin_page(gateway)) as page:
        keyboard = page.page.keyboard
        await keyboard.press("Tab")
        assert await page.page.evaluate("document.activeElement.textContent") == "Skip to the question"
        await keyboard.press("Tab")
        assert await page.page.evaluate("document.activeElement.id") == "key"
        await keyboard.type(ADMIN_KEY)
        await keyboard.press("Enter")
        await page.wait_text("#key-message", "The key works.")
        await page.wait_attribute("#throughput svg", "aria-label", "tokens/s")
        reached = await tab_through(page)
        for name in ("question", "send", "clear", "chat-log", "rollback", "summary", "a", "select"):
            assert name in reached
        await page.page.locator("#question").focus()
        await keyboard.type("first line")
        await keyboard.press("Shift+Enter")
        await keyboard.type("second line")
        await keyboard.press("Enter")
        await answered(page)
        assert script.bodies[0]["messages"][0]["content"] == "first line\nsecond line"
        page.check()


async def tab_through(page: Watched) -> set[str]:
    """Ids or tags of what Tab leads to, each with an outline that can be seen, until it leaves the page."""
    reached: set[str] = set()
    for _ in range(80):
        await page.page.keyboard.press("Tab")
        where, outline = await page.page.evaluate(
            "[document.activeElement.id || document.activeElement.localName,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        if where == "body":
            break
        assert outline != "none", where
        reached.add(where)
    return reached


async def test_a_phone_shows_all_without_scrolling_sideways(
    browser: Browser, gateway: RunningGateway, script: Script
) -> None:
    script.pieces = [("W" * 400, 1), (MARKUP, 2)]
    for url in (admin_page(gateway), f"{gateway.url}/console"):
        async with watched(browser, url, viewport={"width": 320, "height": 640}) as page:
            if url.startswith(admin_page(gateway)):
                await sign_in(page)
            await ask(page)
            await answered(page)
            assert await page.page.evaluate("document.documentElement.scrollWidth") <= 320
            page.check()


async def test_a_screen_reader_is_told_in_sentences(public: Watched, script: Script) -> None:
    script.pieces = [(w, 1) for w in ("One ", "sentence", ". ", "And ", "an", "other ", "one", ".")]
    await ask(public)
    await answered(public)
    said = await public.page.locator("#announcements p").all_text_contents()
    assert "".join(said).replace(" ", "") == "Onesentence.Andanotherone."
    assert len(said) <= 2  # not one for each token
    assert await public.page.get_attribute("#announcements", "aria-live") == "polite"
    assert await public.page.get_attribute("#chat-log", "aria-live") is None


async def test_curves_of_what_does_not_vary_are_drawn_all_the_same(console: Watched, gateway: RunningGateway) -> None:
    for slot, step in enumerate((4.0, 5.0)):
        point = {"step": step, "time": float(slot), "reward": 0.0, "loss": -1.5}
        await asyncio.to_thread(gateway.store.put, KEYS.training_point(slot), orjson.dumps(point))
    await console.wait_attribute("#reward svg", "aria-label", "reward: now 0.00, between 0.00 and 0.00")
    for figure in ("#reward", "#loss"):
        drawn = await console.page.locator(f"{figure} svg path").first.get_attribute("d") or ""
        assert re.fullmatch(r"M[\d. -]+L[\d. -]+", drawn), drawn
