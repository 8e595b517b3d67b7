"""`python -m trainer.rewards.server --config FILE`: rewards for programs that are no trainer, over HTTP.

The release policies of a server score live answers with it: whoever answers users must not load a classifier or run
somebody's code. Any other program can ask it too, and a server of one's own in any language can stand in for it:

    GET  /healthz  {"rewards": ["math", "helpful"]}
    POST /score    {"prompt": "2+2=", "answer": "4", "expected": "4", "extra": {}, "turns": [], "rewards": ["math"]}
                   {"scores": {"math": 1.0}, "failures": {}}

`rewards` names those that are asked for, by default all. One that has no value is in `failures` with the reason, and
never counts as 0. Exit status: as of `python -m trainer.api`.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from trainer.config import GatewayConfig, RewardConfig
from trainer.config.strict import Count, Section, read
from trainer.errors import ConfigError
from trainer.launch import status_of
from trainer.main import quiet
from trainer.rewards import ComparingReward, RewardRequest, Scorer, Weighted, build_rewards
from weightsync.tls import is_loopback

Text = Annotated[str, Field(max_length=4 * 2**20)]


class RewardServerConfig(Section, frozen=True):
    """`rewards` are entries as a trainer has them; `group` rewards compare samples and have no place here. `gateway` is
    where a judge answers that names no server. With `key_file`, a request must carry the key in it as a bearer token;
    beyond loopback there must be one, and a TLS proxy before it. `pending` bounds the answers that are being scored."""

    rewards: Annotated[tuple[RewardConfig, ...], Meta(min_length=1, description="Name at least one reward")]
    host: str = "127.0.0.1"
    port: int = 8500
    key_file: str | None = None
    gateway: GatewayConfig | None = None
    pending: Count = 256

    def __post_init__(self) -> None:
        for reward in self.rewards:
            if reward.kind == "group":
                raise ConfigError("rewards", "a group reward compares samples", "Use rewards of single answers")
        if self.key_file is None and not is_loopback(self.host):
            problem = f"{self.host} is beyond loopback, and there is no key"
            raise ConfigError("key_file", problem, "Name the file of a key, or listen on 127.0.0.1")

    def key(self) -> str:
        """Empty if none is asked for. Raises ConfigError."""
        if self.key_file is None:
            return ""
        try:
            key = Path(self.key_file).read_text().strip()
        except OSError as error:
            raise ConfigError("key_file", f"cannot read {self.key_file} ({error.strerror})", "Correct it") from None
        if not key:
            raise ConfigError("key_file", f"{self.key_file} is empty", "Write the key into it")
        return key


class ScoreRequest(BaseModel):
    """One answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: Text
    answer: Text
    expected: Text | list[Text] = ""
    extra: dict[str, Any] = {}
    turns: list[dict[str, Any]] = []
    tokens: Annotated[int, Field(ge=0)] = 0
    truncated: bool = False
    messages: list[dict[str, Any]] = []
    rewards: list[str] | None = None


class Scorers:
    """A scorer for each reward, so that a request asks for those alone that it needs."""

    def __init__(self, rewards: Mapping[str, Weighted], pending: int) -> None:
        self._scorers = {name: Scorer({name: replace(reward, weight=1.0)}) for name, reward in rewards.items()}
        self._pending, self._room = 0, pending

    @property
    def names(self) -> list[str]:
        return list(self._scorers)

    def open(self) -> None:
        """Raises ConfigError, RewardError."""
        for scorer in self._scorers.values():
            scorer.open()

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()

    @property
    def full(self) -> bool:
        return self._pending >= self._room

    async def score(self, request: RewardRequest, names: list[str]) -> dict[str, dict[str, Any]]:
        """The score of each of `names`, or the reason why there is none."""
        self._pending += 1
        try:
            found = await asyncio.gather(*(self._scorers[name](request) for name in names))
        finally:
            self._pending -= 1
        scores = {name: value for score in found for name, value in score.parts.items()}
        failures = dict.fromkeys(set(names) - scores.keys(), "it does not apply to this record")
        failures |= {name: why for score in found for name, why in score.failures.items()}
        return {"scores": scores, "failures": failures}


def build_app(scorers: Scorers, key: str) -> FastAPI:
    """The app; `scorers` are open while it runs."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(scorers.close)

    app = FastAPI(title="hotswap rewards", lifespan=lifespan, openapi_url=None)

    @app.middleware("http")
    async def door(request: Request, call_next: Any) -> Any:
        said = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(said.encode(), key.encode()) and request.url.path != "/healthz":
            return _refused(401, "unauthorized", "Send the key of this server's key_file as a bearer token.")
        return await call_next(request)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _refused(400, "invalid_parameter", f"{where or 'body'}: {first['msg']}")

    @app.get("/healthz")
    async def healthz() -> dict[str, list[str]]:
        return {"rewards": scorers.names}

    @app.post("/score")
    async def score(body: ScoreRequest) -> Any:
        names = scorers.names if body.rewards is None else list(dict.fromkeys(body.rewards))
        unknown = [name for name in names if name not in scorers.names]
        if unknown:
            known = ", ".join(scorers.names)
            return _refused(404, "unknown_reward", f"There is no reward {unknown[0]!r} here; there are {known}.")
        if scorers.full:
            return _refused(429, "overloaded", "Too many answers are being scored; ask again later.")
        fields = body.model_dump(exclude={"rewards", "turns", "messages", "expected"})
        expected, *others = [body.expected] if isinstance(body.expected, str) else body.expected or [""]
        turns, messages = tuple(body.turns), tuple(body.messages)
        request = RewardRequest(expected=expected, alternatives=tuple(others), turns=turns, messages=messages, **fields)
        return await scorers.score(request, names)

    return app


def _refused(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": code}}, status)


def serve(config: RewardServerConfig) -> None:
    """Returns when the process is asked to end. Raises TrainerError."""
    rewards = build_rewards(config.rewards, config.gateway)
    assert not any(isinstance(weighted.reward, ComparingReward) for weighted in rewards.values())
    scorers, key = Scorers(rewards, config.pending), config.key()
    try:
        scorers.open()
    except BaseException:
        scorers.close()
        raise
    app = build_app(scorers, key)
    uvicorn.Server(
        uvicorn.Config(app, config.host, config.port, log_level="warning", timeout_graceful_shutdown=2)
    ).run()


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, serve. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="hotswap reward-server", description="Score answers over HTTP.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML; trainer/configs/rewards.yaml is one")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override a value, e.g. port=8500")
    parsed = parser.parse_args(arguments)
    quiet()
    return status_of(lambda: serve(read(RewardServerConfig, parsed.config, parsed.set)))


if __name__ == "__main__":
    sys.exit(main())
