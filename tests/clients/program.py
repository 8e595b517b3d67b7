"""Asks a server in every way its argument names, again and again until standard input ends; prints what came of it.

`python program.py CLIENT URL MODEL`, in a process of its own: each client brings packages that nothing else needs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

from pydantic import BaseModel

TOKENS = 48
QUESTION = "What is 2 + 2?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
Ways = dict[str, Callable[[], Awaitable[object]]]


class Verdict(BaseModel):
    """A structured answer that weights of no sense give too."""

    verdict: Literal["yes", "no"]


TOOL: Any = {
    "type": "function",
    "function": {"name": "judge", "description": "Judges.", "parameters": Verdict.model_json_schema()},
}
CHOICE: Any = {"type": "function", "function": {"name": "judge"}}


async def of(answer: Awaitable[Any], read: Callable[[Any], object]) -> object:
    return read(await answer)


async def last(events: Awaitable[AsyncIterator[Any]]) -> object:
    return [event async for event in await events][-1]


def openai_ways(url: str, model: str) -> Ways:
    import openai

    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    chats: Any = client.chat.completions
    ask = {"model": model, "messages": MESSAGES, "max_tokens": TOKENS}
    plain: Any = {"model": model, "prompt": QUESTION, "max_tokens": TOKENS}
    response: Any = {"model": model, "input": QUESTION, "max_output_tokens": TOKENS}
    return {
        "chat": lambda: of(chats.create(**ask), lambda answer: answer.choices[0]),
        "stream": lambda: last(chats.create(**ask, stream=True)),
        "completion": lambda: of(client.completions.create(**plain), lambda answer: answer.choices[0]),
        "response": lambda: of(client.responses.create(**response), lambda answer: answer.id),
        # Whether it calls the tool is up to weights of no sense.
        "tool": lambda: of(chats.create(**ask, tools=[TOOL], tool_choice=CHOICE), lambda answer: answer.choices[0]),
        "structured": lambda: of(
            chats.parse(**ask, response_format=Verdict), lambda answer: answer.choices[0].message.parsed
        ),
    }


def anthropic_ways(url: str, model: str) -> Ways:
    import anthropic

    messages: Any = anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0).messages
    ask = {"model": model, "messages": MESSAGES}

    async def stream() -> object:
        async with messages.stream(**ask, max_tokens=TOKENS) as events:
            return (await events.get_final_message()).content[0]

    return {
        "chat": lambda: of(messages.create(**ask, max_tokens=TOKENS), lambda answer: answer.content[0]),
        "stream": stream,
        "count": lambda: of(messages.count_tokens(**ask), lambda answer: answer.input_tokens),
    }


def langchain_ways(url: str, model: str) -> Ways:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    llm = ChatOpenAI(model=model, base_url=url + "/v1", api_key=SecretStr("unused"), max_retries=0, max_tokens=TOKENS)  # type: ignore[call-arg]

    async def stream() -> object:
        return [chunk.content async for chunk in llm.astream(QUESTION)][-2]

    return {
        "chat": lambda: of(llm.ainvoke(QUESTION), lambda answer: answer.content),
        "stream": stream,
        "structured": lambda: llm.with_structured_output(Verdict, method="json_schema").ainvoke(QUESTION),
    }


def llama_index_ways(url: str, model: str) -> Ways:
    from llama_index.llms.openai_like import OpenAILike

    there: Any = {"api_base": url + "/v1", "api_key": "unused", "max_retries": 0, "is_chat_model": False}
    llm = OpenAILike(model=model, max_tokens=TOKENS, **there)
    return {
        "completion": lambda: of(llm.acomplete(QUESTION), lambda answer: answer.text),
        "stream": lambda: of(last(llm.astream_complete(QUESTION)), lambda part: part.text),
    }


def litellm_ways(url: str, model: str) -> Ways:
    import litellm

    named: Any = {"model": "hosted_vllm/" + model, "api_base": url + "/v1", "api_key": "unused", "num_retries": 0}
    named |= {"messages": MESSAGES, "max_tokens": TOKENS}
    return {
        "chat": lambda: of(litellm.acompletion(**named), lambda answer: answer.choices[0].message),
        "stream": lambda: last(litellm.acompletion(**named, stream=True)),
    }


def instructor_ways(url: str, model: str) -> Ways:
    import instructor
    import openai

    plain = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    chats = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA).chat.completions
    ask: Any = {"model": model, "messages": MESSAGES, "max_tokens": TOKENS, "max_retries": 0}
    return {"structured": lambda: chats.create(**ask, response_model=Verdict)}


def pydantic_ai_ways(url: str, model: str) -> Ways:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url + "/v1", api_key="unused"))
    plain = Agent(served, model_settings={"max_tokens": TOKENS}, retries=0)
    judge = Agent(served, output_type=NativeOutput(Verdict), model_settings={"max_tokens": TOKENS}, retries=0)
    return {
        "chat": lambda: of(plain.run(QUESTION), lambda answer: answer.output),
        "structured": lambda: of(judge.run(QUESTION), lambda answer: answer.output),
    }


OF_OPENAI = (openai_ways, langchain_ways, llama_index_ways, litellm_ways, instructor_ways, pydantic_ai_ways)
CLIENTS = {ways.__name__.removesuffix("_ways"): ways for ways in (*OF_OPENAI, anthropic_ways)}


async def main(client: str, url: str, model: str) -> None:
    ways = CLIENTS[client](url, model)
    over, first = threading.Event(), asyncio.Event()
    asked: Counter[str] = Counter()
    failures: list[str] = []

    async def ask(name: str) -> None:
        while not over.is_set():
            try:
                answer = await ways[name]()
                assert answer is not None
                asked[name] += 1
                first.set()
            except Exception as failure:
                failures.append(f"{name}: {type(failure).__name__}: {failure}")
                first.set()
                return

    running = [asyncio.create_task(ask(name)) for name in ways]
    await first.wait()
    print("asking", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    over.set()
    await asyncio.gather(*running)
    print(json.dumps({"asked": asked, "failures": failures, "ways": list(ways)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
