"""The probes of a rolling swap, against instances made of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.errors import ConfigError
from server.gateway import GatewayConfig
from server.gateway.models.probes import DEFAULT_PROMPTS, ProbePrompt, ProbeSettings, build_probe, load_probes
from tests.server.gateway.upstream import Link, Received, upstream
from weightsync.control.records import ActiveRecord, InstanceRecord, SwapRecord
from weightsync.control.trial import ProbeResult

SWAP = SwapRecord("s", 7, "canary", ("i0", "i1"), deadline=0.0, opened_at=0.0, mode="rolling", canary="i0")
ACTIVE = ActiveRecord(6, 3, 5, "r", 0.0)
PROMPTS = (ProbePrompt("sum", (1, 2), max_tokens=3),)


@dataclass
class Fake:
    """An instance that answers a fixed text; `shift` is added to every log-probability it gives."""

    version: int
    text: str = "the answer is 42"
    shift: float = 0.0
    versions: list[int] | None = None
    tokens: int = 3
    hang: bool = False
    status: bytes = b"200 OK"
    asked: list[Received] = field(default_factory=list)

    async def __call__(self, link: Link, request: Received) -> None:
        self.asked.append(request)
        if self.hang:
            await asyncio.sleep(3600)
        await link.json(self._answer(request).encode(), status=self.status)

    def _answer(self, request: Received) -> str:
        """As Python writes JSON: with NaN, as an instance's own answer may have it."""
        body = orjson.loads(request.body)
        if request.target == "/tokenize":
            return json.dumps({"tokens": [1, 2, 3]})
        if request.target == "/v1/completions":
            ids = body["prompt"]
            rows = [None, *({str(t): {"logprob": -1.0 / (1 + t) + self.shift}} for t in ids[1:])]
            return json.dumps({"choices": [{"prompt_logprobs": rows}]})
        assert request.target == "/generate"
        spans = [{"start": 0, "end": self.tokens, "version": v} for v in self.versions or [self.version]]
        logprobs = [-0.5 + self.shift] * self.tokens
        choice = {"text": self.text, "token_ids": [9] * self.tokens, "logprobs": logprobs, "weight_versions": spans}
        return json.dumps({"choices": [choice]})


async def probed(canary: Fake, other: Fake | None = None, **settings: Any) -> ProbeResult:
    """The verdict of a probe of `canary`; `other` runs the active version."""
    async with contextlib.AsyncExitStack() as stack:
        fleet = []
        for name, fake, version in (("i0", canary, 7), ("i1", other, 6)):
            if fake is not None:
                address = (await stack.enter_async_context(upstream(fake))).address
                state = "COMMITTING" if name == "i0" else "STAGED"
                key = "" if name == "i1" else "of-i0"
                fleet.append(InstanceRecord(name, address, state=state, active_version=version, key=key))  # type: ignore[arg-type]
        probe = build_probe(ProbeSettings("toy", **{"prompts": PROMPTS, "timeout_s": 20.0, **settings}), lambda: fleet)
        result: ProbeResult = await probe(fleet[0], SWAP, ACTIVE)
        return result


async def test_a_sound_canary_passes() -> None:
    canary = Fake(7)
    assert await probed(canary, prompts=DEFAULT_PROMPTS) == ProbeResult(True)
    assert [orjson.loads(r.body)["prompt_token_ids"] for r in canary.asked] == [list(p.prompt) for p in DEFAULT_PROMPTS]
    scopes = {r.headers["x-hotswap-cache-scope"] for r in canary.asked}
    assert len(scopes) == len(canary.asked), "no two probes share cached blocks"
    assert all(re.fullmatch("[0-9a-f]{32}", scope) for scope in scopes)
    assert {r.headers["authorization"] for r in canary.asked} == {"Bearer of-i0"}


@pytest.mark.parametrize(
    ("canary", "words"),
    [
        (Fake(7, versions=[6]), "prompt sum was answered by version 6, not by version 7 alone"),
        (Fake(7, versions=[6, 7]), "version 6, 7, not by version 7 alone"),
        (Fake(7, shift=math.nan), "log-probability of nan"),
        (Fake(7, shift=-math.inf), "log-probability of -inf"),
        (Fake(7, tokens=0), "without tokens"),
        (Fake(7, status=b"500 Internal Server Error"), "prompt sum was answered with status 500"),
    ],
)
async def test_what_every_canary_must_do(canary: Fake, words: str) -> None:
    result = await probed(canary)
    assert not result.ok
    assert words in result.detail


@pytest.mark.parametrize(
    ("expectation", "words"),
    [
        ({"expect": "43"}, "answered 'the answer is 42', which does not contain '43'"),
        ({"expect": re.compile("^42")}, "in which '^42' is not found"),
        ({"min_mean_logprob": -0.4}, "mean log-probability of -0.500, asked for were -0.4"),
    ],
)
async def test_what_a_file_may_expect(expectation: dict[str, Any], words: str) -> None:
    result = await probed(Fake(7), prompts=(ProbePrompt("sum", "6 * 7 =", **expectation),))
    assert not result.ok
    assert result.detail.startswith("prompt sum ")
    assert words in result.detail
    good = {"expect": "42", "min_mean_logprob": -0.6}
    assert (await probed(Fake(7), prompts=(ProbePrompt("sum", "6 * 7 =", **good),))).ok  # type: ignore[arg-type]


async def test_an_instance_that_hangs_or_is_gone_fails_the_probe() -> None:
    assert "not answered within 0.2 s" in (await probed(Fake(7, hang=True), timeout_s=0.2)).detail
    probe = build_probe(ProbeSettings("toy", PROMPTS), list)
    result = await probe(InstanceRecord("i0", "http://127.0.0.1:1"), SWAP, ACTIVE)
    assert not result.ok
    assert "prompt sum was not answered" in result.detail


async def test_drift_is_measured_against_an_instance_with_the_active_version() -> None:
    other = Fake(6)
    assert (await probed(Fake(7), other, max_logprob_drift=0.05)).ok
    scored = [orjson.loads(r.body) for r in other.asked if r.target == "/v1/completions"]
    assert [body["prompt"] for body in scored] == [[1, 2, 9, 9, 9]], "its own answer, after the prompt"
    result = await probed(Fake(7, shift=-0.2), other, max_logprob_drift=0.05)
    assert "differ from the active version's by 0.2000 a token on average, at most 0.05 may be" in result.detail
    assert (await probed(Fake(7, shift=-0.2), other, max_logprob_drift=0.25)).ok
    text = (ProbePrompt("text", "one two", max_tokens=1),)
    assert (await probed(Fake(7), Fake(6), max_logprob_drift=0.05, prompts=text)).ok
    assert "no other instance runs version 6" in (await probed(Fake(7), max_logprob_drift=0.05)).detail


# the file


def test_files_in_yaml_and_jsonl(tmp_path: Path) -> None:
    text = "- {prompt: '6 * 7 =', expect: '42', name: sum}\n- {prompt: [1, 2], max_tokens: 3, min_mean_logprob: -2}\n"
    (file := tmp_path / "probes.yaml").write_text(text)
    one, two = load_probes(file)
    assert one == ProbePrompt("sum", "6 * 7 =", 8, "42", None)
    assert two == ProbePrompt("#2", (1, 2), 3, None, -2)
    (file := tmp_path / "p.jsonl").write_text('{"prompt": "x", "expect": {"regex": "^a.c$"}}\n\n')
    (line,) = load_probes(file)
    assert line.expect == re.compile("^a.c$")
    assert load_probes(None) == DEFAULT_PROMPTS


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "[]", "must end in .yaml"),
        ("p.yaml", "[]", "at least one probe"),
        ("p.yaml", "prompt: x", "must hold a list"),
        ("p.yaml", "{", "cannot be read"),
        ("p.jsonl", "{", "cannot be read"),
        ("p.yaml", "- x", "entry 1: Expected `object`"),
        ("p.yaml", "- {prompt: x}\n- {prompt: x, answer: y}", "entry 2: Object contains unknown field `answer`"),
        ("p.yaml", "- {expect: x}", "required field `prompt`"),
        ("p.yaml", "- {prompt: []}", "length >= 1 - at `$.prompt`"),
        ("p.yaml", "- {prompt: [1, -1]}", "`int` >= 0 - at `$.prompt[1]`"),
        ("p.yaml", "- {prompt: x, max_tokens: 0}", "`int` >= 1 - at `$.max_tokens`"),
        ("p.yaml", "- {prompt: x, max_tokens: yes}", "got `bool` - at `$.max_tokens`"),
        ("p.yaml", "- {prompt: x, min_mean_logprob: 0.5}", "<= 0.0 - at `$.min_mean_logprob`"),
        ("p.yaml", "- {prompt: x, min_mean_logprob: .nan}", "<= 0.0 - at `$.min_mean_logprob`"),
        ("p.yaml", "- {prompt: x, expect: 42}", "got `int` - at `$.expect`"),
        ("p.yaml", "- {prompt: x, expect: {regex: '('}}", "not a regular expression"),
        ("p.yaml", "- {prompt: x, expect: {regex: a, flags: i}}", "unknown field `flags` - at `$.expect`"),
        ("p.yaml", "- {prompt: x, name: a}\n- {prompt: y, name: a}", "same name"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (path := tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_probes(path)
    assert str(path) in str(caught.value)


def test_settings_from_the_gateway(tmp_path: Path) -> None:
    config = GatewayConfig(store="sqlite:///x", model="toy", max_logprob_drift=0.1)
    assert ProbeSettings.of(config) == ProbeSettings("toy", DEFAULT_PROMPTS, max_logprob_drift=0.1)
    with pytest.raises(ConfigError, match="nowhere"):
        ProbeSettings.of(GatewayConfig(store="sqlite:///x", model="toy", probes_file=tmp_path / "nowhere.yaml"))
    with pytest.raises(ConfigError, match="--max-logprob-drift 0"):
        ProbeSettings.of(GatewayConfig(store="sqlite:///x", model="toy", max_logprob_drift=0.0))
