"""The guard of a rolling swap: questions to the canary alone, before anybody else is given its weights.

The canary has flipped and is out of routing; it is asked at its own address. It must answer every prompt, with tokens
of the target version only and finite log-probabilities, and meet what the file of `--probes` expects. With a bound on
the drift, an instance that still runs the active version answers too, and both score that answer token by token
(teacher forcing, by vLLM's `prompt_logprobs`): the mean absolute difference must not exceed the bound.

The file of `--probes` is a list in YAML (.yaml, .yml), or one JSON object a line (.jsonl). Each entry:

    prompt            text, or a list of token ids
    max_tokens        1 to 1024, default 8; the answer is greedy
    name              for messages; default "#1", "#2", ...
    expect            text that the answer must contain, or {regex: PATTERN} that must be found in it
    min_mean_logprob  what the mean log-probability of the answer's tokens must reach (0 or less)
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
import yaml
from msgspec import Meta

from server.errors import ConfigError, ServerError
from server.gateway.config import GatewayConfig
from weightsync.control.records import ActiveRecord, InstanceRecord, SwapRecord
from weightsync.control.trial import Probe, ProbeResult
from weightsync.tls import ClusterTls

if TYPE_CHECKING:
    import httpx  # at run time only where something is asked: it is 5 MB, and many gateways never ask

SERVING = frozenset({"SERVING", "STAGING", "STAGED"})


@dataclass(frozen=True)
class ProbeSettings:
    """The questions to a canary. Times in seconds, `max_logprob_drift` in nats a token (None: not measured)."""

    model: str
    prompts: tuple[ProbePrompt, ...]
    timeout_s: float = 30.0
    max_logprob_drift: float | None = None

    @classmethod
    def of(cls, config: GatewayConfig) -> ProbeSettings:
        """Reads the file of `--probes`. Raises ConfigError."""
        drift = config.max_logprob_drift
        if drift is not None and not drift > 0:
            raise ConfigError(f"--max-logprob-drift {drift:g}: must be over 0; kernels alone make some difference.")
        return cls(config.model, load_probes(config.probes_file), max_logprob_drift=drift)


def build_probe(
    settings: ProbeSettings, fleet: Callable[[], Iterable[InstanceRecord]], tls: ClusterTls | None = None
) -> Probe:
    """The callable for the coordinator; `fleet` says who there is to compare with, `tls` is for https addresses."""
    verify = tls.client_context() if tls is not None else True

    async def probe(canary: InstanceRecord, swap: SwapRecord, active: ActiveRecord | None) -> ProbeResult:
        import httpx

        try:
            async with asyncio.timeout(settings.timeout_s):
                async with httpx.AsyncClient(timeout=settings.timeout_s, verify=verify, trust_env=False) as client:
                    reference = _reference(settings, fleet(), canary, active)
                    for prompt in settings.prompts:
                        await _check(_Asker(client, canary, settings.model), prompt, swap.target)
                        if reference is not None:
                            await _compare(client, settings, prompt, canary, reference)
        except TimeoutError:
            return ProbeResult(False, f"its probes were not answered within {settings.timeout_s:g} s")
        except ServerError as failure:
            return ProbeResult(False, str(failure))
        return ProbeResult(True)

    return probe


@dataclass(frozen=True)
class Answer:
    """The answer that an instance generated."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    versions: set[int]


@dataclass(frozen=True)
class _Asker:
    """Asks one instance; every fault becomes a ServerError that says what it was."""

    client: httpx.AsyncClient
    instance: InstanceRecord
    model: str

    async def generate(self, prompt: ProbePrompt, *, ignore_eos: bool = False) -> Answer:
        """The greedy answer."""
        field = "prompt" if isinstance(prompt.prompt, str) else "prompt_token_ids"
        body = {field: prompt.prompt, "max_tokens": prompt.max_tokens, "temperature": 0, "logprobs": True}
        found = await self._post(prompt, "/generate", {**body, "stream": False, "ignore_eos": ignore_eos})
        try:
            (choice,) = found["choices"]
            versions = {int(span["version"]) for span in choice["weight_versions"]}
            return Answer(str(choice["text"]), list(choice["token_ids"]), list(choice["logprobs"] or ()), versions)
        except (KeyError, TypeError, ValueError) as error:
            raise self._failed(prompt, f"gave an answer that cannot be read ({error!r})") from error

    async def tokens(self, prompt: ProbePrompt) -> list[int]:
        """The prompt as token ids."""
        if not isinstance(prompt.prompt, str):
            return list(prompt.prompt)
        found = await self._post(prompt, "/tokenize", {"model": self.model, "prompt": prompt.prompt})
        return [int(token) for token in found["tokens"]]

    async def score(self, prompt: ProbePrompt, tokens: list[int], begin: int) -> list[float]:
        """The log-probabilities of `tokens[begin:]`, each after all tokens before it."""
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        found = await self._post(prompt, "/v1/completions", body)
        try:
            rows = found["choices"][0]["prompt_logprobs"]
            return [rows[i][str(tokens[i])]["logprob"] for i in range(begin, len(tokens))]
        except (KeyError, IndexError, TypeError) as error:
            raise self._failed(prompt, f"gave log-probabilities that cannot be read ({error!r})") from error

    async def _post(self, prompt: ProbePrompt, path: str, body: dict[str, Any]) -> Any:
        import httpx

        # A scope of its own: a probe shares no cached block with clients, nor with another probe. A canary that is on
        # trial refuses whatever is not marked as a probe.
        headers = {"x-hotswap-cache-scope": secrets.token_hex(16), "x-hotswap-probe": "1"}
        headers |= {"authorization": f"Bearer {self.instance.key}"} if self.instance.key else {}
        try:
            answer = await self.client.post(self.instance.address + path, json=body, headers=headers)
            if answer.status_code != 200:
                raise self._failed(prompt, f"was answered with status {answer.status_code}: {answer.text[:200]}")
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise self._failed(prompt, f"was not answered ({error or type(error).__name__})") from error

    def _failed(self, prompt: ProbePrompt, what: str) -> ServerError:
        return ServerError(f"prompt {prompt.name} {what} [{self.instance.id}, {self.instance.address}]")


async def _check(asker: _Asker, prompt: ProbePrompt, target: int) -> None:
    answer = await asker.generate(prompt)
    if not answer.token_ids or len(answer.logprobs) != len(answer.token_ids):
        raise ServerError(f"prompt {prompt.name} was answered without tokens or without their log-probabilities")
    if answer.versions != {target}:
        labels = ", ".join(str(version) for version in sorted(answer.versions)) or "none"
        raise ServerError(f"prompt {prompt.name} was answered by version {labels}, not by version {target} alone")
    _require_finite(prompt, answer.logprobs)
    if (objection := prompt.objection(answer.text, answer.logprobs)) is not None:
        raise ServerError(f"prompt {prompt.name} {objection}")


async def _compare(
    client: httpx.AsyncClient,
    settings: ProbeSettings,
    prompt: ProbePrompt,
    canary: InstanceRecord,
    reference: InstanceRecord,
) -> None:
    new, old = _Asker(client, canary, settings.model), _Asker(client, reference, settings.model)
    begin = await old.tokens(prompt)
    tokens = begin + (await old.generate(prompt, ignore_eos=True)).token_ids
    ours = await new.score(prompt, tokens, len(begin))
    theirs = await old.score(prompt, tokens, len(begin))
    _require_finite(prompt, ours)
    drift = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
    if settings.max_logprob_drift is not None and not drift <= settings.max_logprob_drift:
        raise ServerError(
            f"prompt {prompt.name}: log-probabilities differ from the active version's by {drift:.4f} a token on "
            f"average, at most {settings.max_logprob_drift:g} may be"
        )


def _reference(
    settings: ProbeSettings, fleet: Iterable[InstanceRecord], canary: InstanceRecord, active: ActiveRecord | None
) -> InstanceRecord | None:
    """An instance that runs the active version, if the drift is to be measured. Raises ServerError without one."""
    if settings.max_logprob_drift is None or active is None:
        return None
    for other in fleet:
        if other.id != canary.id and other.active_version == active.version and other.state in SERVING:
            return other
    raise ServerError(
        f"no other instance runs version {active.version}, so the drift cannot be measured: run two or more instances, "
        "or leave out --max-logprob-drift"
    )


def _require_finite(prompt: ProbePrompt, logprobs: list[float]) -> None:
    odd = [value for value in logprobs if not isinstance(value, int | float) or not math.isfinite(value)]
    if odd:
        raise ServerError(f"prompt {prompt.name} was answered with a log-probability of {odd[0]}")


MAX_TOKENS = 1024
_Text = Annotated[str, Meta(min_length=1)]
_Tokens = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]


class _Regex(msgspec.Struct, forbid_unknown_fields=True):
    regex: str


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the file."""

    prompt: _Text | _Tokens
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 8
    name: _Text = ""
    expect: _Text | _Regex | None = None
    min_mean_logprob: Annotated[float, Meta(le=0)] | None = None


@dataclass(frozen=True)
class ProbePrompt:
    """One question and what its answer must be like."""

    name: str
    prompt: str | tuple[int, ...]
    max_tokens: int = 8
    expect: str | re.Pattern[str] | None = None
    min_mean_logprob: float | None = None

    def objection(self, text: str, logprobs: list[float]) -> str | None:
        """The fault of this answer, None if it has none."""
        if isinstance(self.expect, re.Pattern) and self.expect.search(text) is None:
            return f"answered {_short(text)}, in which {self.expect.pattern!r} is not found"
        if isinstance(self.expect, str) and self.expect not in text:
            return f"answered {_short(text)}, which does not contain {self.expect!r}"
        mean = sum(logprobs) / len(logprobs)
        if self.min_mean_logprob is not None and mean < self.min_mean_logprob:
            return f"has a mean log-probability of {mean:.3f}, asked for were {self.min_mean_logprob:g} or more"
        return None


DEFAULT_PROMPTS = tuple(
    ProbePrompt(f"default {number}", tokens, max_tokens=4)
    for number, tokens in enumerate(((1,), (1, 2, 3), (5, 4, 3, 2)), 1)
)


def load_probes(path: Path | None) -> tuple[ProbePrompt, ...]:
    """The prompts of the file, or the default ones. Raises ConfigError, which names the entry."""
    if path is None:
        return DEFAULT_PROMPTS
    entries = _entries(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"--probes {path}: must hold a list of at least one probe.")
    prompts = tuple(_prompt(f"--probes {path}, entry {n}", n, entry) for n, entry in enumerate(entries, 1))
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise ConfigError(f"--probes {path}: two probes have the same name; a failure could not be told apart.")
    return prompts


def _entries(path: Path) -> Any:
    try:
        text = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text)
        if path.suffix == ".jsonl":
            return [orjson.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, orjson.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"--probes {path}: cannot be read: {error}.") from error
    raise ConfigError(f"--probes {path}: must end in .yaml, .yml or .jsonl.")


def _prompt(where: str, number: int, raw: Any) -> ProbePrompt:
    try:
        entry = msgspec.convert(raw, _Entry)
        expect = re.compile(entry.expect.regex) if isinstance(entry.expect, _Regex) else entry.expect
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}.") from error
    except re.error as error:
        raise ConfigError(f"{where}: `expect.regex` is not a regular expression: {error}.") from error
    return ProbePrompt(entry.name or f"#{number}", entry.prompt, entry.max_tokens, expect, entry.min_mean_logprob)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
