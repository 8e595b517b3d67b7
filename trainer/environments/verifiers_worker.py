"""The process of verifiers environments: `PYTHON verifiers_worker.py JOB`, with a Python that has `verifiers`.

It speaks the protocol of worker.py and imports nothing of Hotswap: verifiers asks for other releases of packages than
Hotswap pins, so it lives in an environment of its own.

verifiers runs an episode itself and asks an OpenAI-compatible endpoint for each answer of the model. That endpoint is
here. A request to it waits until the trainer's next `step` brings the answer:

    reset -> run_episode -> request -> its messages, the prompt
    step  -> answer to the request -> next request -> the messages since then; or the end, and the reward
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

MODEL = "policy"
KEY_VARIABLE = "HOTSWAP_VERIFIERS_KEY"  # the endpoint asks for none, but verifiers wants one
SESSION = "X-Session-ID"  # verifiers' name of an episode's trace, in each request
CHARACTERS = 64  # of a token, at most: as in base.py


class Game:
    """One episode of verifiers, which asks, and one of the trainer, which answers."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._asked: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[str]]] = asyncio.Queue()
        self._answer: asyncio.Future[str] | None = None
        self._known: list[tuple[str, str]] = []  # roles and texts of the conversation so far
        self._playing: asyncio.Task[Any] | None = None
        self.sessions: list[str] = []

    async def begin(self, environment: Any, context: Any, task: Any, games: dict[str, Game]) -> dict[str, Any]:
        """The prompt."""

        def traced(trace: Any) -> None:
            self.sessions.append(trace.id)
            games[trace.id] = self

        self._playing = asyncio.create_task(environment.run_episode(task, context, on_trace=traced))
        return await self._next()

    async def step(self, answer: str) -> dict[str, Any]:
        assert self._answer is not None
        self._known.append(("assistant", ""))
        self._answer.set_result(answer)
        self._answer = None
        return await self._next()

    async def ask(self, body: dict[str, Any]) -> str:
        """For the endpoint: the model's answer."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((body, answer))
        return await answer

    def end(self) -> None:
        if self._playing is not None:
            self._playing.cancel()

    async def _next(self) -> dict[str, Any]:
        assert self._playing is not None
        asked = asyncio.create_task(self._asked.get())
        await asyncio.wait({asked, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            body, self._answer = asked.result()
            return {"messages": self._new(body), "reward": 0.0, "done": False}
        asked.cancel()
        return {"messages": [], "reward": _reward(self._playing.result()), "done": True}

    def _new(self, body: dict[str, Any]) -> list[dict[str, str]]:
        """The messages that the model has not seen."""
        messages = [{"role": m["role"], "content": _text(m.get("content"))} for m in body["messages"]]
        said = [(m["role"], "" if m["role"] == "assistant" else m["content"]) for m in messages]
        count = len(self._known)
        if said[:count] != self._known:
            raise NotImplementedError("it writes the conversation anew between two turns. Switch its compaction off.")
        self._known = said
        if count:
            most = CHARACTERS * self._job["max_observation_tokens"] // max(len(messages) - count, 1)
            return [{**m, "content": m["content"][:most]} for m in messages[count:]]
        return self._described(messages, body.get("tools") or [])

    def _described(self, messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> list[dict[str, str]]:
        """With the tools' schemas in the system message."""
        if not tools:
            return messages
        described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        tags = {"start": self._job["call_start"], "end": self._job["call_end"]}
        text = self._job["instructions"].format(tools=described, **tags)
        if messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise NotImplementedError("it says something else than text.")
    return "".join(part["text"] for part in content)


def _reward(episode: Any) -> float:
    """The sum over the traces that are trained on."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


# the endpoint ---------------------------------------------------------------------------------------------------------


def message_of(answer: str, start: str, end: str) -> dict[str, Any]:
    """An answer as OpenAI's message: what stands between the tags are calls, if it can be read as such."""
    text, *pieces = answer.split(start)
    calls = []
    for number, piece in enumerate(pieces):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found = json.loads(piece.split(end)[0])
            function = {"name": str(found["name"]), "arguments": json.dumps(found.get("arguments", {}))}
            calls.append({"id": f"call_{number}", "index": number, "type": "function", "function": function})
    if len(calls) < len(pieces):
        return {"role": "assistant", "content": answer}
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


class Endpoint:
    """`POST /v1/chat/completions` on the loopback device, for the harnesses of this process alone."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self.games: dict[str, Game] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> Any:
        """Its URL."""
        from aiohttp import web

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        game = self.games.get(request.headers.get(SESSION, ""))
        if game is None:
            return web.json_response({"error": {"message": "no episode has this session"}}, status=404)
        body = await request.json()
        message = message_of(await game.ask(body), self._job["call_start"], self._job["call_end"])
        reason = "tool_calls" if "tool_calls" in message else "stop"
        common = {"id": f"chatcmpl-{time.monotonic_ns()}", "created": int(time.time()), "model": MODEL}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # the trainer counts them
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return web.json_response({**common, "object": "chat.completion", "choices": [choice], "usage": usage})
        common["object"] = "chat.completion.chunk"
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choices = [[{"index": 0, "delta": message, "finish_reason": None}]]
        choices += [[{"index": 0, "delta": {}, "finish_reason": reason}], []]
        for piece, counted in zip(choices, (None, None, usage), strict=True):
            chunk = {**common, "choices": piece, "usage": counted}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


# the process ----------------------------------------------------------------------------------------------------------


class Episodes:
    """The games that are under way, by the trainer's number."""

    def __init__(self, job: dict[str, Any], environment: Any, endpoint: Endpoint, context: Any) -> None:
        self._job, self._environment, self._endpoint, self._context = job, environment, endpoint, context
        self._games: dict[int, Game] = {}

    async def answer(self, request: dict[str, Any]) -> Any:
        """The value for a request. Raises what went wrong."""
        episode = request["episode"]
        if request["op"] == "close":
            if (over := self._games.pop(episode, None)) is not None:
                over.end()
                for session in over.sessions:
                    self._endpoint.games.pop(session, None)
            return {}
        if request["op"] == "step":
            return await self._games[episode].step(request["answer"])
        game = self._games[episode] = Game(self._job)
        task = self._task(int(request["task"]["answer"]))
        return await game.begin(self._environment, self._context, task, self._endpoint.games)

    def _task(self, number: int) -> Any:
        for task in self._environment.taskset.include(idx=[str(number)]):
            return task
        raise LookupError(f"the taskset has no task {number}")


async def serve(job: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    """Until there are no more requests."""
    try:
        from verifiers.v1 import EvalClientConfig, ModelContext
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        environment = load_environment(resolve_env_config(job["env"]))
    except Exception as error:
        advice = "Install verifiers and the taskset for environment.python, and correct environment.env"
        say(replies, {"key": "environment.env", "problem": f"{type(error).__name__}: {error}", "advice": advice})
        return
    os.environ[KEY_VARIABLE] = "-"
    endpoint = Endpoint(job)
    async with endpoint.open() as url, environment.serving():
        context = ModelContext(model=MODEL, client=EvalClientConfig(base_url=url, api_key_var=KEY_VARIABLE))
        episodes = Episodes(job, environment, endpoint, context)
        say(replies, {})
        loop, tasks = asyncio.get_running_loop(), set()

        async def answered(request: dict[str, Any]) -> None:
            try:
                reply = {"value": await episodes.answer(request)}
            except Exception as error:
                reply = {"problem": f"{type(error).__name__}: {error}"}
            say(replies, {"id": request["id"], **reply})

        with ThreadPoolExecutor(1) as reader:
            while line := await loop.run_in_executor(reader, requests.readline):
                task = loop.create_task(answered(json.loads(line)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)


def say(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")


def main() -> None:
    """Serve until standard input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the environment prints is no reply
    sys.path.pop(0)  # this directory: its modules are not for others to find
    asyncio.run(serve(json.loads(sys.argv[1]), requests, replies))


if __name__ == "__main__":
    main()
