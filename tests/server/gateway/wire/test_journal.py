"""The journal of a stream, with which another instance can go on with it: in whatever pieces it came."""

from __future__ import annotations

import random
from typing import Any

import pytest

from server.gateway.wire.journal import BUNDLE, ID_BYTES, Journal, ReplayMemory
from server.resume import Span
from tests.server.continued import chat, event

HOSTILE = '"token_ids":[9,9,9],"weight_version":77,"finish_reason":"stop","weight_versions":[],\n\ndata: [DONE]\n\n'


def generate(tokens: list[int], versions: list[int], text: str = "x", name: str = "weight_versions") -> list[bytes]:
    """A stream of /generate, one version a token; neighbours of another one share an event."""
    events, start = [], 0
    while start < len(tokens):
        end = min(len(tokens), start + (2 if start % 5 == 0 else 1))
        said: dict[str, Any] = {"index": 0, "text": text, "token_ids": tokens[start:end], "logprobs": None}
        said["weight_version"] = versions[end - 1]
        if start == 0:
            said["prompt_weight_versions"] = [{"version": versions[0], "start": 0, "end": 4}]
        if len(set(versions[start:end])) > 1:
            said[name] = [{"version": v, "start": s, "end": e} for v, s, e in spans(versions[:end])]
        events.append(event(said, b"event: token\n"))
        start = end
    done = event({"id": "g", "choices": [{"index": 0, "finish_reason": "length"}], "usage": {}}, b"event: done\n")
    return [*events, done]


def spans(versions: list[int]) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for i, version in enumerate(versions):
        if found and found[-1][0] == version:
            found[-1] = version, found[-1][1], i + 1
        else:
            found.append((version, i, i + 1))
    return found


def opened(memory: ReplayMemory | None = None, request_bytes: int = 0) -> Journal:
    journal = (memory or ReplayMemory(2**30, 2**30)).open(request_bytes)
    assert journal is not None
    return journal


def pieces_of(data: bytes, chance: random.Random) -> list[bytes]:
    found = []
    while data:
        size = chance.choice((1, 2, 7, 100, 1000, 20_000))
        found.append(data[:size])
        data = data[size:]
    return found


def test_spans_with_versions_as_text_are_read_too() -> None:
    data = b"".join(chat([5, 6, 7], version=4))
    journal = opened()
    journal.take(data.replace(b'{"version":4,', b'{"version":"4",'))
    assert journal.broken()
    assert journal.resume(4).spans == [Span(4, 0, 3)]


@pytest.mark.parametrize("seed", range(30))
def test_clients_get_whole_events_and_the_journal_knows_their_tokens(seed: int) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(2**18) for _ in range(chance.choice((3, 40, 700)))]
    versions = sorted(chance.choice((3, 4, 5)) for _ in tokens) if seed % 3 else [3] * len(tokens)
    name = "hotswap_weight_versions" if seed % 4 == 2 else "weight_versions"
    events = generate(tokens, versions, HOSTILE if seed % 2 else "x", name)
    data = b"".join(events)
    data = data[: chance.randrange(len(data))]
    journal = opened()
    out = b"".join(journal.take(piece) for piece in pieces_of(data, chance))
    count = data.count(b"\n\n")  # no text has them: JSON writes \\n
    assert out == b"".join(events[:count])
    assert journal.broken()
    assert journal.rest() == b""
    had = sum(e.count(b'"token_ids"') and len(tokens_in(e)) for e in events[:count])
    resume = journal.resume(7)
    assert resume.tokens == tokens[:had]
    assert [(s.version, s.start, s.end) for s in resume.spans] == spans(versions[:had])
    assert resume.version == 7
    assert resume.resumed_at == [had]
    assert journal.version == (versions[had - 1] if had else None)
    assert not had or resume.prompt_spans == [Span(versions[0], 0, 4)]


def tokens_in(said: bytes) -> list[bytes]:
    return said.partition(b'"token_ids":[')[2].partition(b"]")[0].split(b",") if b"event: token" in said else []


def test_the_end_of_an_answer() -> None:
    events = chat([4, 5])
    found = []
    for count in range(len(events) + 1):
        journal = opened()
        for each in events[:count]:
            journal.take(each)
        assert journal.broken()
        resume = journal.resume(1)
        found.append((resume.lead, len(resume.tokens), resume.finish_reason, resume.usage_sent, journal.done))
    assert found == [
        (0, 0, None, False, False),
        (1, 0, None, False, False),
        (1, 1, None, False, False),
        (1, 2, "stop", False, False),
        (1, 2, "stop", True, False),
        (1, 2, "stop", True, True),
    ]


def test_what_follows_the_last_token_is_read_whenever_it_comes() -> None:
    """The usage and the end, of which the journal hears after it has read all tokens; they name the version, too."""
    tokens, usage, end = chat([4, 5])[:-2], chat([4, 5], usage=True)[-2], chat([4, 5])[-1]
    journal = opened()
    for each in (*tokens, b":" + b"x" * BUNDLE + b"\n\n", usage.replace(b"}\n\n", b',"weight_version":1}\n\n'), end):
        journal.take(each)
    assert journal.broken()
    assert (journal.resume(1).usage_sent, journal.done) == (True, True)


def test_what_was_held_back_goes_out_when_the_body_ends_in_order() -> None:
    journal = opened()
    assert journal.take(b"data: 1\n\ndata: no en") == b"data: 1\n\n"
    assert journal.rest() == b"data: no en"
    assert journal.rest() == b""


def test_comments_are_no_events_of_the_answer() -> None:
    journal = opened()
    assert journal.take(b": ping\n\n") == b": ping\n\n"
    for each in chat([4, 5])[:2]:
        journal.take(each)
    assert journal.broken()
    assert (journal.resume(1).tokens, journal.resume(1).lead) == ([4], 1)


@pytest.mark.parametrize(
    "tail",
    [
        b"data: {\n\n",
        b"data: []\n\n",
        event({"error": {}}),
        b'data: {"error":"x"}\n\n',
        event({"choices": [{"token_ids": [-1]}], "weight_version": 1}),
        event({"choices": [{"token_ids": [4]}]}),
    ],
)
def test_what_cannot_be_read_cannot_be_continued(tail: bytes) -> None:
    memory = ReplayMemory(2**20, 2**20)
    journal = opened(memory)
    out = b"".join(journal.take(piece) for piece in (*chat([4, 5])[:2], tail))
    assert out.endswith(tail)
    assert not journal.broken()
    assert memory.used == 0


def test_an_error_after_many_tokens_is_the_end() -> None:
    """The client has been told that the answer is over, so nobody may go on with it."""
    journal = opened()
    said = chat(list(range(2000)))
    for piece in said[:1000]:
        journal.take(piece)
    journal.take(said[1000] + event({"error": {"code": "weights_changed"}}))
    assert not journal.broken()


def test_memory() -> None:
    memory = ReplayMemory(3 * BUNDLE, 2 * BUNDLE)
    assert memory.open(BUNDLE + 1) is None
    first, second = opened(memory, BUNDLE), opened(memory)
    assert memory.used == 3 * BUNDLE
    assert memory.open(0) is None
    first.close()
    first.close()
    assert memory.used == BUNDLE
    for each in generate(list(range(BUNDLE)), [1] * BUNDLE):
        assert second.take(each) == each  # passes, though it has become too long to be kept
    assert not second.broken()
    assert memory.used == 0


@pytest.mark.parametrize("bound", ["stream", "all"])
def test_a_stream_may_fill_its_memory_to_the_last_byte_and_not_further(bound: str) -> None:
    """Each of the two bounds by itself, the other one far away."""
    many, far = 50, 2**30
    room = 7 + BUNDLE + many * ID_BYTES
    memory = ReplayMemory(far, room) if bound == "stream" else ReplayMemory(room + BUNDLE, far)
    other = opened(memory) if bound == "all" else None
    for count, fits in ((many, True), (many + 1, False)):
        journal = opened(memory, 7)
        for each in chat(list(range(count))):
            journal.take(each)
        assert journal.broken() == fits
        assert memory.used - BUNDLE * (other is not None) == (room if fits else 7)
        journal.close()
    assert other is None or other.broken(), "it loses nothing by what others ask for"


def test_the_request_stays_until_the_end() -> None:
    memory = ReplayMemory(2**20, 2**20)
    journal = opened(memory, 100)
    journal.take(b"data: {\n\n")
    assert not journal.broken()
    assert memory.used == 100
    journal.close()
    assert memory.used == 0


def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    memory = ReplayMemory(2**20, 40_000)
    journal = opened(memory)
    out = b"".join(journal.take(b"x" * 1000) for _ in range(100))
    assert len(out) == 100_000
    assert not journal.broken()
    assert memory.used == 0
