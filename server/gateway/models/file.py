"""The file that names the models of a gateway (`--models`, docs/models.md): YAML, strict, read whole or not at all.

models:
  - name: small
    checkpoint: /models/small      # `hotswap up` starts its instances; without one they are started elsewhere
  - name: hosted
    upstream: {url: https://api.example.com/v1, model: large-1, api-key-file: /etc/hotswap/example.key}
aliases:
  fast: [small, hosted]
allow-origins: [https://chat.example.com]
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta

from server.errors import ConfigError
from server.gateway.access.key_sources import read_private
from server.gateway.config import GatewayConfig
from server.gateway.models.probes import ProbeSettings
from weightsync.tls import is_loopback

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$")]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class UpstreamEntry(msgspec.Struct, forbid_unknown_fields=True, rename="kebab", frozen=True):
    """A server that is not ours and speaks OpenAI's API. `model` is its name for the model, if it is another."""

    url: str
    model: Annotated[str, Meta(max_length=200)] = ""
    api_key_file: str = ""
    api_key_env: str = ""
    ca_file: str = ""
    connect_timeout: Seconds = 5.0
    read_timeout: Seconds = 600.0
    max_in_flight: Annotated[int, Meta(ge=0)] = 0


class ModelEntry(msgspec.Struct, forbid_unknown_fields=True, rename="kebab", frozen=True):
    """A model: one whose instances register in the store, or an `upstream`'s.

    `checkpoint` and what follows are for `hotswap up`, which starts `instances` of it with its own arguments for vLLM
    and then these.
    """

    name: Name
    upstream: UpstreamEntry | None = None
    probes: str = ""
    max_logprob_drift: Annotated[float, Meta(gt=0)] | None = None
    checkpoint: str = ""
    instances: Annotated[int, Meta(ge=1, le=1024)] = 1
    kv_cache_gib: Annotated[float, Meta(gt=0)] | None = None
    vllm_args: list[str] = []


class _File(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    models: Annotated[list[ModelEntry], Meta(min_length=1, max_length=256)]
    aliases: dict[Name, Annotated[list[str], Meta(min_length=1, max_length=16)] | str] = {}
    allow_origins: list[str] = []


@dataclass(frozen=True)
class External:
    """An upstream as it is used. `key` is a secret: it is in no `repr`, no log and no answer."""

    name: str
    host: str
    port: int
    path: str
    model: str
    key: str
    tls: ssl.SSLContext | None = field(compare=False)
    entry: UpstreamEntry

    def __repr__(self) -> str:
        return f"External({self.name!r}, {self.entry.url!r})"


@dataclass(frozen=True)
class ModelsFile:
    """The file's content, checked. `own` are the models of instances, with what is special to each; the first one of
    the file is the default."""

    names: tuple[str, ...]
    own: Mapping[str, ModelEntry]
    external: Mapping[str, External]
    aliases: Mapping[str, tuple[str, ...]]
    origins: tuple[str, ...]

    @classmethod
    def of(cls, config: GatewayConfig) -> ModelsFile:
        """The file that `config` names; without one, its one model. Raises ConfigError."""
        if config.models is not None:
            return read(config.models)
        return cls((config.model,), {config.model: ModelEntry(config.model)}, {}, {}, ())

    def main(self, config: GatewayConfig) -> str:
        """The model of ours that stands for the gateway in what is done once for all: --model, else the first."""
        if config.model and config.model not in self.own:
            advice = "name it there, or leave --model out"
            raise ConfigError(f"--model {config.model}: is no model of instances in {config.models}; {advice}.")
        return config.model or next(iter(self.own))

    def settings_of(self, name: str, config: GatewayConfig) -> GatewayConfig:
        """The gateway's settings as they hold for this model. Raises ConfigError."""
        entry = self.own[name]
        changed: dict[str, Any] = {"model": name}
        changed |= {"probes_file": Path(entry.probes)} if entry.probes else {}
        changed |= {"max_logprob_drift": entry.max_logprob_drift} if entry.max_logprob_drift is not None else {}
        settings = replace(config, **changed)
        ProbeSettings.of(settings)
        return settings


def read(path: Path) -> ModelsFile:
    """Reads and checks the file, and the files that it names. Raises ConfigError, with the line of the mistake."""
    try:
        text = path.read_text()
        found = msgspec.convert(yaml.safe_load(text), _File)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--models {path}: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"--models {path}{_line(text, str(error))}: {error}") from error
    for where, problem in _problems(found):
        raise ConfigError(f"--models {path}{_line(text, where)}: {problem}")
    aliases = {name: (to,) if isinstance(to, str) else tuple(to) for name, to in found.aliases.items()}
    own, external = {}, {}
    for number, entry in enumerate(found.models):
        if entry.upstream is None:
            own[entry.name] = entry
            continue
        try:
            external[entry.name] = _external(entry.name, entry.upstream)
        except ConfigError as error:
            where = _line(text, f"`$.models[{number}].upstream`")
            raise ConfigError(f"--models {path}{where}: model {entry.name}: {error}") from error
    return ModelsFile(tuple(e.name for e in found.models), own, external, aliases, tuple(found.allow_origins))


def _problems(found: _File) -> Iterator[tuple[str, str]]:
    """The faults that the types do not show: the place of each, and what is wrong."""
    names: set[str] = set()
    for number, entry in enumerate(found.models):
        if entry.name in names:
            yield f"`$.models[{number}]`", f"there are two models {entry.name}; names are unique."
        names.add(entry.name)
        if entry.upstream is not None and (entry.probes or entry.max_logprob_drift is not None):
            yield f"`$.models[{number}]`", f"model {entry.name}: an upstream has no swaps to probe; leave that out."
        if entry.upstream is not None and entry.checkpoint:
            yield f"`$.models[{number}]`", f"model {entry.name}: is an upstream's or a checkpoint's; leave one out."
        if not entry.checkpoint and (entry.instances > 1 or entry.kv_cache_gib is not None or entry.vllm_args):
            yield f"`$.models[{number}]`", f"model {entry.name}: what it starts with needs a checkpoint; name one."
    if all(entry.upstream is not None for entry in found.models):
        yield "`$.models`", "name one model of instances at least; upstreams alone have no store to look after."
    for alias, to in found.aliases.items():
        where, targets = f"`$.aliases.{alias}`", [to] if isinstance(to, str) else to
        if alias in names:
            yield where, f"alias {alias}: a model has that name."
        if len(set(targets)) < len(targets):
            yield where, f"alias {alias}: names a model twice."
        for target in targets:
            if target not in names:
                yield where, f"alias {alias}: there is no model {target}; there are: {', '.join(sorted(names))}."
    for number, origin in enumerate(found.allow_origins):
        if not is_origin(origin):
            yield f"`$.allow-origins[{number}]`", f"{origin!r}: write SCHEME://HOST[:PORT] as browsers do, or '*'."


def is_origin(text: str) -> bool:
    """Whether it is what a browser sends as Origin, or "*"."""
    return text == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s@?#]+", text) is not None


def _external(name: str, entry: UpstreamEntry) -> External:
    parts = urlsplit(entry.url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    host, tls = parts.hostname or "", parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not host or port == -1 or parts.query or parts.fragment:
        raise ConfigError("url: give https://HOST[:PORT]/v1, as OpenAI's clients take it.")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("url: no password belongs there; use api-key-file or api-key-env.")
    if not tls and not is_loopback(host):
        raise ConfigError("url: beyond this host it must be https.")
    if entry.api_key_file and entry.api_key_env:
        raise ConfigError("api-key-file and api-key-env: give one of them.")
    context = None
    if tls:
        try:
            context = ssl.create_default_context(cafile=entry.ca_file or None)
        except OSError as error:
            raise ConfigError(f"ca-file {entry.ca_file}: cannot be used ({error.strerror or error}).") from error
    elif entry.ca_file:
        raise ConfigError("ca-file: is of https alone.")
    path = parts.path.rstrip("/")
    return External(name, host, port or (443 if tls else 80), path, entry.model or name, _key(entry), context, entry)


def _key(entry: UpstreamEntry) -> str:
    if entry.api_key_file:
        key, where = read_private(Path(entry.api_key_file)).strip(), f"api-key-file {entry.api_key_file}"
    elif entry.api_key_env:
        key, where = os.environ.get(entry.api_key_env, "").strip(), f"api-key-env {entry.api_key_env}"
    else:
        return ""
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{where}: holds no key of printable characters.")
    return key


def _line(text: str, where: str) -> str:
    """`, line N` of the place that msgspec names in a message (`$.models[1].url`), as near as YAML's nodes have it."""
    found = re.search(r"\$[^`]*", where)
    node = yaml.compose(text)
    line = node.start_mark.line if node is not None else 0
    for key, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", found[0] if found is not None else ""):
        if isinstance(node, yaml.MappingNode) and key:
            pair = next(((k, v) for k, v in node.value if k.value == key), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line, pair[1]
        elif isinstance(node, yaml.SequenceNode) and index and int(index) < len(node.value):
            node = node.value[int(index)]
            line = node.start_mark.line
        else:
            break
    return f", line {line + 1}"
