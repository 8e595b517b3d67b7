"""Requests that no engine gets: prompts and grammars that would take the host, ids that the model lacks, and addresses
of this host or a private network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import envs
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.multimodal.media.base import MediaIO
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from server.instance import media, requests
from server.instance.grammars.bounds import MOST_BYTES, MOST_CHOICES, MOST_DEPTH, MOST_NODES, check
from server.instance.grammars.guard import bounded
from server.instance.inflight import Inflight, Problem
from server.instance.main import prepare_environment
from server.instance.provenance import Trace, current_trace, traced
from server.instance.requests import MOST_SEQUENCES, MOST_TEXT, bound_renderer, bound_scoring, bounded_scores, known_ids
from tests.server.asking import answering

# prompts


class Renderer:
    """As vLLM's: `render_cmpl_async` tokenizes its prompts by the other method."""

    def __init__(self) -> None:
        self.tokenized: list[Any] = []

    async def tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        self.tokenized.append(prompt)
        return prompt

    async def render_cmpl_async(self, prompts: Any, params: Any = None) -> Any:
        return await asyncio.gather(*(self.tokenize_prompt_async(p, params) for p in prompts))


@pytest.mark.parametrize("length", [1000, 2**20])
async def test_a_prompt_is_bounded_as_text_and_as_ids(length: int) -> None:
    renderer = Renderer()
    bound_renderer(renderer, length)
    most = max(MOST_TEXT, 8 * length)
    for good in ({"prompt": "x" * most}, {"prompt_token_ids": [1] * 5}, {"prompt_embeds": None}):
        await renderer.render_cmpl_async([good])
    for bad in (
        {"prompt": "x" * (most + 1)},
        {"prompt_token_ids": [1] * (most + 1)},
        {"encoder_prompt": {"prompt": "x" * (most + 1)}, "decoder_prompt": None},
    ):
        with pytest.raises(VLLMValidationError, match=f"send {most} at most"):
            await renderer.render_cmpl_async([bad])
    assert len(renderer.tokenized) == 3


async def test_the_prompts_of_a_request_are_counted_before_any_is_tokenized() -> None:
    renderer = Renderer()
    bound_renderer(renderer, 1000)
    with pytest.raises(VLLMValidationError, match=f"{MOST_SEQUENCES + 1} prompts"):
        await renderer.render_cmpl_async([{"prompt": "a"}] * (MOST_SEQUENCES + 1))
    assert not renderer.tokenized


async def test_prompts_times_choices_are_counted_as_long_as_they_run() -> None:
    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[], prompt_token_ids=[])

    wrapped = traced(generate, Inflight())
    current_trace.set(Trace())

    def ask(n: int) -> Any:
        return wrapped({}, SimpleNamespace(n=n, extra_args=None, prompt_logprobs=None), "id")

    for _ in range(3):  # one after the other, as beam search does
        assert len([o async for o in ask(MOST_SEQUENCES)]) == 1
    half = ask(MOST_SEQUENCES // 2)
    other = ask(MOST_SEQUENCES // 2)
    with pytest.raises(VLLMValidationError, match=f"{MOST_SEQUENCES + 1} prompts and choices"):
        ask(1)
    for running in (half, other):
        assert len([o async for o in running]) == 1
    ask(1)


@pytest.mark.parametrize(
    ("query", "items", "good"),
    [
        ("hi", ["a"] * 1000, True),
        ("hi", ["a"] * (MOST_SEQUENCES + 1), False),
        ("x" * (MOST_TEXT + 1), ["a"], False),
        ([1] * 1000, ["a"] * 2000, False),  # the query is copied for each item
        ("hi", ["x" * MOST_TEXT], False),
    ],
)
async def test_scoring_is_bounded_by_all_its_prompts(query: Any, items: list[str], good: bool) -> None:
    class Serving:
        async def create_generative_scoring(self, request: Any, raw: Any) -> str:
            return "scored"

    serving = Serving()
    bound_scoring(serving, 1000)
    score = serving.create_generative_scoring(SimpleNamespace(query=query, items=items), None)
    if good:
        assert await score == "scored"
    else:
        with pytest.raises(VLLMValidationError, match=r"send .* at most"):
            await score


@pytest.mark.parametrize(
    ("first", "second", "good"),
    [
        ("hi", "a", True),
        (["hi"] * 1000, ["a"] * 1000, True),
        (["x" * 1000] * 500, ["y" * 1000] * 500, True),
        ("hi", ["a"] * (MOST_SEQUENCES + 1), False),
        ("x" * 2000, ["a"] * 1000, False),
        (["x" * 2000], ["a"] * 1000, False),
        ({"content": []}, [{"content": []}], True),
        ("hi", ["x" * MOST_TEXT], False),
    ],
)
@pytest.mark.parametrize("names", [("query", "documents"), ("data_1", "data_2")])
async def test_pairs_are_bounded_by_all_their_prompts(
    first: Any, second: Any, good: bool, names: tuple[str, str]
) -> None:
    async def scores(request: Any, raw: Any) -> str:
        return "scored"

    score = bounded_scores(scores, 1000)(SimpleNamespace(**dict(zip(names, (first, second), strict=True))), None)
    if good:
        assert await score == "scored"
    else:
        with pytest.raises(VLLMValidationError, match=r"send .* at most"):
            await score


# ids that the model lacks, however the route renders them

SIZE = 512


def token(*ids: int) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(ids)}


def image(*ids: int, offset: int, length: int) -> dict[str, Any]:
    places = {"image": [PlaceholderRange(offset=offset, length=length)]}
    return {"type": "multimodal", "prompt_token_ids": list(ids), "mm_placeholders": places}


@pytest.mark.parametrize(
    "prompt",
    [
        token(511, SIZE),
        token(-1, 5),
        token(5, 2**40),
        {"type": "enc_dec", "encoder_prompt": token(SIZE), "decoder_prompt": token(1)},
        {"type": "enc_dec", "encoder_prompt": token(1), "decoder_prompt": token(SIZE)},
        {"type": "embeds", "prompt_embeds": None, "prompt_token_ids": [SIZE]},
        image(600, 600, SIZE, offset=0, length=2),
        {"type": "multimodal", "prompt_token_ids": [1], "mm_placeholders": {}, "encoder_prompt_token_ids": [SIZE]},
    ],
)
def test_an_id_that_the_model_lacks_is_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="outside the model's vocabulary of 512"):
        requests.check(prompt, SIZE)


@pytest.mark.parametrize("prompt", [token(0, 511), token(), image(600, 600, 5, offset=0, length=2)])
def test_ids_of_the_model_and_placeholders_of_an_image_pass(prompt: dict[str, Any]) -> None:
    requests.check(prompt, SIZE)


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}, {"prompt_token_ids": [5]}])
def test_a_prompt_that_nobody_rendered_is_no_way_around(prompt: Any) -> None:
    with pytest.raises(TypeError, match="rendered"):
        requests.check(prompt, SIZE)


async def test_it_raises_before_a_stream_begins_and_in_every_part_of_one_that_is_sent() -> None:
    def generate(prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        async def parts() -> AsyncIterator[Any]:
            if isinstance(prompt, dict):
                yield prompt
                return
            async for part in prompt:
                yield part

        return parts()

    checked = known_ids(generate, SIZE)
    with pytest.raises(VLLMValidationError):
        checked(token(SIZE), None, "a")  # not first when it is awaited: the head of an answer is not out yet
    assert [part async for part in checked(prompt=token(5), params=None, request_id="b")] == [token(5)]

    async def spoken() -> AsyncIterator[Any]:
        yield SimpleNamespace(prompt=token(5))
        yield SimpleNamespace(prompt=token(SIZE))

    heard = checked(spoken(), None, "c")
    assert (await anext(heard)).prompt == token(5)
    with pytest.raises(VLLMValidationError):
        await anext(heard)


# schemas, patterns and grammars: what explodes is refused, what clients send is not

INT = {"type": "integer"}


def array(inner: Any, **bounds: Any) -> dict[str, Any]:
    return {"type": "array", "items": inner, **bounds}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "array", "minItems": 10**9}}, "repeated 1000000000 times"),
    ({"json": '{"type": "array", "minItems": 1000000000}'}, "repeated 1000000000 times"),
    ({"json": array(INT, maxItems=1e300)}, "repeated"),
    ({"json": array(array(INT, minItems=100), minItems=100)}, "repeated 10000 times"),
    ({"json": array({"type": "string", "maxLength": 100}, maxItems=100)}, "characters repeated"),
    ({"json": array({"type": "string", "pattern": "a{80}"}, maxItems=80)}, "pattern repeated"),
    ({"json": {"type": "string", "minLength": 10**7}}, "repeated"),
    ({"json": {"type": "object", "minProperties": 10**7}}, "repeated"),
    ({"json": {"enum": [str(n) for n in range(5000)]}}, "enum of 5000"),
    ({"json": {"properties": {f"p{n}": {"type": "string"} for n in range(6000)}}}, "bytes|objects"),
    ({"json": deep(60)}, "deep"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "itself"),
    ({"json": {"$ref": "#"}}, "itself"),
    ({"json": {"properties": {"x": {"$defs": {}, "$ref": "#/properties/x"}}}}, "itself"),
    ({"choice": ["x"] * (MOST_CHOICES + 1)}, "choices"),
    ({"choice": ["x" * MOST_BYTES, "y"]}, "bytes"),
    ({"regex": "[a-z]{100000000}"}, "repeated 100000000 times"),
    ({"regex": "((a{1,100}){1,100}){1,100}"}, "repeated"),
    ({"regex": "(?:(x|b{90}){90}|c)"}, "repeated 8100 times"),
    ({"regex": "a{99999999999999999999}"}, "repeated"),
    ({"regex": "\\p{Lu}{5000}"}, "repeated"),
    ({"regex": "a" * (MOST_BYTES + 1)}, "bytes"),
    ({"grammar": 'root ::= root "a" | "a"'}, "'root' begins with itself"),
    ({"grammar": 'root ::= a "x"\na ::= "y" | b\nb ::= (a) "z"'}, "begins with itself"),
    ({"grammar": "root ::= ([a-z]{1000}){1000}"}, "repeated"),
    ({"grammar": "root ::= " + '"a" ' * MOST_BYTES}, "bytes"),
    (
        {"structural_tag": '{"structures": [{"begin": "<f>", "schema": {"minItems": 99999999}, "end": "</f>"}]}'},
        "items",
    ),
]

USUAL: list[dict[str, Any]] = [
    {"json_object": True},
    {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 200}, "age": INT}}},
    {"json": array({"type": "object", "properties": {"tags": array({"type": "string"}, maxItems=20)}}, maxItems=50)},
    {"json": {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"}},
    {"json": "not JSON, which vLLM says"},
    {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?"},
    {"regex": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"},
    {"regex": ".*[a-z]+(x|y)*"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"\n# root ::= root'},
]


@pytest.mark.parametrize(("asked", "says"), TOO_MUCH)
def test_what_explodes_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(Problem, match=says):
        check(StructuredOutputsParams(**asked))


@pytest.mark.parametrize("asked", USUAL)
def test_what_people_send_passes(asked: dict[str, Any]) -> None:
    check(StructuredOutputsParams(**asked))


def test_a_schema_may_be_as_large_and_as_deep_as_the_bounds() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MOST_DEPTH):
        deep = {"not": deep}
    wide: dict[str, Any] = {"anyOf": [{}] * (MOST_NODES - 2)}  # beside itself and the list
    for schema in (deep, wide):
        check(StructuredOutputsParams(json=schema))
    for schema in ({"not": deep}, {"anyOf": [*wide["anyOf"], {}]}):
        with pytest.raises(Problem):
            check(StructuredOutputsParams(json=schema))


@given(st.text(alphabet="ab(){}[]|*+?,0123456789\\^$.:=<>!-# \n\"'", max_size=200))
def test_any_text_is_judged(text: str) -> None:
    for asked in ({"regex": text or "a"}, {"grammar": text or "a"}, {"json": text or "a"}, {"structural_tag": text}):
        with contextlib.suppress(Problem):
            check(StructuredOutputsParams(**asked))


def test_a_refusal_comes_before_a_stream_begins() -> None:
    called = []
    generate = bounded(lambda *args, **_: called.append(args) or iter(()))  # type: ignore[arg-type, func-returns-value]
    generate("p", SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])), "r")
    generate("p", SamplingParams(), "r")
    assert len(called) == 2
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"] * 2000))
    with pytest.raises(VLLMValidationError, match="structured output: 2000 choices; send 1000 at most"):
        generate("p", bad, "r")
    assert len(called) == 2


# what a request names by URL, unless the operator has listed the host


class Bytes(MediaIO[bytes]):
    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        return data.encode()

    def load_file(self, filepath: Any) -> bytes:
        raise AssertionError(filepath)

    def get_max_bytes(self) -> int | None:
        return None


@dataclass
class Server:
    port: int
    asked: list[str]


@contextlib.contextmanager
def serving(address: str = "127.0.0.1", target: str = "") -> Iterator[Server]:
    """`/away` redirects to `target`."""
    asked: list[str] = []

    def answer(path: str, _: object) -> tuple[int, bytes]:
        asked.append(path)
        return 302 if path == "/away" else 200, b"secret"

    with answering(answer, address, {"location": target}) as url:
        yield Server(int(url.rpartition(":")[2]), asked)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


async def fetch(url: str, *domains: str) -> bytes:
    connector = MEDIA_CONNECTOR_REGISTRY.load(media.NAME, allowed_media_domains=list(domains))
    assert isinstance(connector, media.PublicMedia)
    try:
        return bytes(await connector.load_from_url_async(url, Bytes()))
    finally:
        await (await connector.connection.get_async_client()).close()
        media._connection.cache_clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "0.0.0.0", "2130706433", "[::ffff:127.0.0.1]"])
async def test_nothing_on_this_host_is_asked(server: Server, host: str) -> None:
    with pytest.raises((VLLMValidationError, VLLMUnprocessableEntityError), match=r"not public|Invalid URL"):
        await fetch(f"http://{host}:{server.port}/")
    assert not server.asked


async def test_a_host_that_the_operator_listed_is_asked(server: Server) -> None:
    assert await fetch(f"http://localhost:{server.port}/", "localhost") == b"secret"
    assert await fetch(f"http://127.0.0.1:{server.port}/", "127.0.0.1") == b"secret"


async def test_a_redirect_leads_nowhere_else() -> None:
    with (
        serving("127.0.0.2") as other,
        serving(target=f"http://127.0.0.2:{other.port}/") as server,
        pytest.raises(VLLMValidationError, match="not public"),
    ):
        await fetch(f"http://localhost:{server.port}/away", "localhost")
    assert (server.asked, other.asked) == (["/away"], [])


async def test_what_is_in_the_request_needs_no_address() -> None:
    assert await fetch("data:image/png;base64,AAAA") == b"AAAA"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2001:4860:4860::8888", True), ("64:ff9b::8.8.8.8", True),
        ("10.0.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False), ("::1", False),
        ("fe80::1%lo", False), ("fd00::1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::10.0.0.1", False),
        ("2002:0a00:0001::", False), ("example.org", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert media.is_public(address) is public


def test_instances_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_MEDIA_CONNECTOR", raising=False)
    monkeypatch.setattr("os.environ", {})
    prepare_environment()
    assert envs.VLLM_MEDIA_CONNECTOR == media.NAME
