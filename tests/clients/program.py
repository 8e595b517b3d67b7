"""Asks a server in every way its argument names, again and again until standard input ends; prints what came of it.

`python program.py CLIENT URL MODEL`, in a process of its own: each client brings packages that nothing else needs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
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


def openai_ways(url: str, model: str) -> Ways:
    import openai

    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)

    async def chat() -> object:
        return (await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=TOKENS)).choices[0]

    async def stream() -> object:
        events = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=TOKENS, stream=True)
        return [event async for event in events][-1]

    async def completion() -> object:
        return (await client.completions.create(model=model, prompt=QUESTION, max_tokens=TOKENS)).choices[0]

    async def response() -> object:
        return (await client.responses.create(model=model, input=QUESTION, max_output_tokens=TOKENS)).id

    async def tool() -> object:
        answer = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=TOKENS, tools=[TOOL], tool_choice=CHOICE
        )
        return answer.choices[0].message  # whether it calls the tool is up to weights of no sense

    async def structured() -> object:
        answer = await client.chat.completions.parse(
            model=model, messages=MESSAGES, max_tokens=TOKENS, response_format=Verdict
        )
        return answer.choices[0].message.parsed

    return {f.__name__: f for f in (chat, stream, completion, response, tool, structured)}


def anthropic_ways(url: str, model: str) -> Ways:
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0)

    async def chat() -> object:
        return (await client.messages.create(model=model, max_tokens=TOKENS, messages=MESSAGES)).content[0]

    async def stream() -> object:
        async with client.messages.stream(model=model, max_tokens=TOKENS, messages=MESSAGES) as events:
            return (await events.get_final_message()).content[0]

    async def count() -> object:
        return (await client.messages.count_tokens(model=model, messages=MESSAGES)).input_tokens

    return {f.__name__: f for f in (chat, stream, count)}


def langchain_ways(url: str, model: str) -> Ways:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    llm = ChatOpenAI(model=model, base_url=url + "/v1", api_key=SecretStr("unused"), max_retries=0, max_tokens=TOKENS)  # type: ignore[call-arg]

    async def chat() -> object:
        return (await llm.ainvoke(QUESTION)).content

    async def stream() -> object:
        return [chunk.content async for chunk in llm.astream(QUESTION)][-2]

    async def structured() -> object:
        return await llm.with_structured_output(Verdict, method="json_schema").ainvoke(QUESTION)

    return {f.__name__: f for f in (chat, stream, structured)}


def llama_index_ways(url: str, model: str) -> Ways:
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=url + "/v1", api_key="unused", max_tokens=TOKENS, max_retries=0, is_chat_model=False
    )

    async def completion() -> object:
        return (await llm.acomplete(QUESTION)).text

    async def stream() -> object:
        return [part.text async for part in await llm.astream_complete(QUESTION)][-1]

    return {f.__name__: f for f in (completion, stream)}


def litellm_ways(url: str, model: str) -> Ways:
    import litellm

    named: Any = {"model": "hosted_vllm/" + model, "api_base": url + "/v1", "api_key": "unused", "num_retries": 0}
    named |= {"messages": MESSAGES, "max_tokens": TOKENS}

    async def chat() -> object:
        return (await litellm.acompletion(**named)).choices[0].message

    async def stream() -> object:
        return [part async for part in await litellm.acompletion(**named, stream=True)][-1]

    return {f.__name__: f for f in (chat, stream)}


def instructor_ways(url: str, model: str) -> Ways:
    import instructor
    import openai

    plain = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)

    async def structured() -> object:
        return await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=TOKENS, response_model=Verdict, max_retries=0
        )

    return {"structured": structured}


def pydantic_ai_ways(url: str, model: str) -> Ways:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url + "/v1", api_key="unused"))
    plain = Agent(served, model_settings={"max_tokens": TOKENS}, retries=0)
    judge = Agent(served, output_type=NativeOutput(Verdict), model_settings={"max_tokens": TOKENS}, retries=0)

    async def chat() -> object:
        return (await plain.run(QUESTION)).output

    async def structured() -> object:
        return (await judge.run(QUESTION)).output

    return {f.__name__: f for f in (chat, structured)}


CLIENTS: dict[str, Callable[[str, str], Ways]] = {
    "openai": openai_ways,
    "anthropic": anthropic_ways,
    "langchain": langchain_ways,
    "llama_index": llama_index_ways,
    "litellm": litellm_ways,
    "instructor": instructor_ways,
    "pydantic_ai": pydantic_ai_ways,
}


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
