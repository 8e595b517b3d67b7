"""The chat: streams, colours by version, errors as text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from playwright.async_api import Browser

from server.gateway import UpstreamSettings
from tests.server.console.browser import Watched, watched
from tests.server.console.play import MARKUP, Script, answered, ask, say
from tests.server.gateway.harness import MODEL, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_answer_streams_with_its_version_and_its_times(public: Watched, script: Script) -> None:
    await public.wait_text("#model", MODEL)
    empty = "getComputedStyle(document.getElementById('chat-log'), '::before').content"
    assert "The answers stand here" in await public.page.evaluate(empty)
    assert not await public.page.get_by_text("Weight versions here").is_visible(), "it would head nothing"
    high, page = await public.page.evaluate("[document.getElementById('chat-log').offsetHeight, innerHeight]")
    assert high >= 0.3 * page
    await say(public, "What is this?")
    assert await public.page.evaluate(empty) == "none"
    assert await public.page.get_by_text("Weight versions here").is_visible()
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
        await say(public, text)
    assert [m["content"] for m in script.bodies[1]["messages"]] == ["One", "Hello there.", "Two"]
    await public.page.get_by_role("button", name="Clear").click()
    assert await public.text("#chat-log") == ""
    await say(public, "Three")
    assert [m["content"] for m in script.bodies[2]["messages"]] == ["Three"]


async def test_a_swap_in_the_middle_changes_colour_and_mark(public: Watched, script: Script) -> None:
    script.pieces = [("The", 6), (" old", 6), (" and", 7), (" the new", 7)]
    await say(public)
    runs = public.page.locator("#chat-log .run")
    assert await runs.all_text_contents() == ["The old", " and the new"]
    assert [await run.get_attribute("data-version") for run in await runs.all()] == ["v6", "v7"]
    looks = await runs.evaluate_all(
        "runs => runs.map(r => { const s = getComputedStyle(r), b = getComputedStyle(r, '::before');"
        " return [s.backgroundColor, b.textDecorationStyle, b.content, b.textDecorationLine, s.textDecorationLine]; })"
    )
    assert looks[0][0] != looks[1][0]
    assert looks[0][1] != looks[1][1]  # colour is not the only sign
    assert [look[2:] for look in looks] == [['"v6"', "underline", "none"], ['"v7"', "underline", "none"]]
    assert await public.text("#legend") == "v6 2 tokensv7 2 tokens"
    assert "v6: 0–2, v7: 2–4" in await public.text("#chat-log .facts")
    assert "From here on weight version 7 answers." in await public.text("#announcements")


async def test_what_a_model_or_an_error_says_is_text_and_never_markup(public: Watched, script: Script) -> None:
    script.error = {"message": f"No. {MARKUP}", "type": "conflict_error", "param": None, "code": "version_unavailable"}
    await say(public)
    assert await public.text("#chat-log .error") == f"No. {MARKUP} [409 version_unavailable]"
    script.error, script.pieces = None, [(MARKUP[:20], 1), (MARKUP[20:], 2)]
    await say(public, MARKUP)
    assert script.bodies[-1]["messages"] == [{"role": "user", "content": MARKUP}], "without the one that failed"
    assert (await public.page.locator("#chat-log .text").all_text_contents())[-2:] == [MARKUP, MARKUP]
    assert await public.page.locator("#chat-log :is(img, script, b, a)").count() == 0


async def test_stop_ends_the_request_at_the_instance(public: Watched, script: Script) -> None:
    script.gate = asyncio.Event()
    await ask(public)
    await public.wait_text("#chat-log .run", "Hello")
    assert "token" not in (await public.text("#chat-log .facts")).replace("first token", ""), "a piece may have several"
    await public.page.get_by_role("button", name="Stop").click()
    await answered(public)
    await asyncio.wait_for(script.gone.wait(), 60)
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
        await say(public, text)
    assert await public.page.locator("#chat-log .message:not(.mine) .text").all_text_contents() == ["Hello there."] * 2
    assert "no chat template" in await public.text("#chat-notice")
    chat, first, second = script.bodies
    assert "messages" in chat
    assert (first["prompt"], second["prompt"]) == ("Once upon", "And then")


async def test_what_a_swap_is_to_do_is_asked_for(public: Watched, script: Script) -> None:
    await public.page.get_by_label("If the weights change").select_option("finish")
    await public.page.get_by_label("Tokens at most").fill("7")
    await public.page.get_by_label("go on past the end").check()
    await say(public)
    assert (script.bodies[0]["max_tokens"], script.bodies[0]["ignore_eos"]) == (7, True)
    assert b"hotswap" not in orjson.dumps(script.bodies)  # the gateway takes it out and sends it as a header
    assert script.policies == ["finish"]


async def test_no_instance_is_a_typed_error(browser: Browser, tmp_path: Path) -> None:
    with running_gateway(tmp_path, upstream=UpstreamSettings(hold_s=0)) as gateway:
        async with watched(browser, f"{gateway.url}/console") as page:
            await say(page)
            assert "[503 no_instance]" in await page.text("#chat-log .error")
            page.check()
