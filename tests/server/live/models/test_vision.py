"""A model of images and text, swapped and rolled back under load: its answers are those of fresh stock engines.

The same images are asked about before and after: what one version made of an image must not reach another one's answer.
"""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from loadtest.models.kinds import make_blip2
from tests import stock
from tests.asking import Asking
from tests.live import LiveServer
from tests.server.live.models.test_kinds import first_span
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.broad]
TOKENS, LONG = 24, 400
STEP = 16  # tokens of a batch: of several prompts one is cut, and a commit finds it in the middle of its image
COLOURS = ((220, 20, 60), (30, 60, 200), (240, 240, 20))


def about(colour: tuple[int, int, int]) -> list[dict[str, Any]]:
    """A conversation with an image in its body."""
    file = io.BytesIO()
    Image.new("RGB", (40, 36), colour).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


QUESTIONS = [about(colour) for colour in COLOURS]


def asked(live: LiveServer, question: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    body = {"model": live.name, "messages": question, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json={**body, "return_token_ids": True}, timeout=240)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class Clients(Asking):
    """They ask about an image each, and count the answers."""

    route = "/v1/chat/completions"

    def __init__(self, live: LiveServer) -> None:
        super().__init__(live.url, 2 * len(QUESTIONS))
        self.name, self.answered = live.name, 0

    def question(self, client: int) -> dict[str, Any]:
        return {"model": self.name, "messages": QUESTIONS[client % len(QUESTIONS)], "max_tokens": 5}

    def take(self, client: int, choice: dict[str, Any]) -> None:
        self.answered += 1

    def wait_for(self, more: int) -> None:
        enough = self.answered + more
        wait_until(lambda: self.answered >= enough, 120)


def said(live: LiveServer) -> list[list[int]]:
    return [asked(live, question, TOKENS)["choices"][0]["token_ids"] for question in QUESTIONS]


def test_answers_about_images_are_those_of_the_version_that_serves(tmp_path: Path) -> None:
    paths = [make_blip2(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    expected = [stock.chats(path, QUESTIONS, TOKENS) for path in paths]
    assert len({str(answer) for answers in expected for answer in answers}) == 2 * len(COLOURS), "some answer alike"
    arguments = ("--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", str(STEP))
    live = LiveServer(paths[0], tmp_path / "state", arguments, name="seeing", instances=2)
    with live.running(), ThreadPoolExecutor(len(QUESTIONS)) as pool:
        first = live.active()
        assert said(live) == expected[0]
        streams = [pool.submit(asked, live, question, LONG) for question in QUESTIONS]
        second = live.push(paths[1])
        for index, stream in enumerate(streams):
            tokens = first_span(stream.result(), first)[:TOKENS]
            assert tokens == expected[0][index][: len(tokens)]
        assert said(live) == expected[1]
        assert live.activate(first).status_code == 200
        assert said(live) == expected[0]
        answer = live.admin.post("/admin/weights/activate", json={"version": second, "mode": "rolling"})
        assert answer.status_code == 200, answer.text
        assert said(live) == expected[1]
        with Clients(live) as clients:
            for version in (first, second, first):
                clients.wait_for(10)
                assert live.activate(version).status_code == 200
        assert not clients.failures
        assert said(live) == expected[0]
