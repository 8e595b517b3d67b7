"""Mappings into frozen structs, strictly: every key must be known, and every value has its declared type and range.

msgspec checks them, and this module says in the words of a YAML file what was refused. Of several sections that a key
may hold, a tag chooses one: `algorithm: {name: grpo, ...}` becomes the struct whose tag is `grpo`.
"""

from __future__ import annotations

import difflib
import importlib
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from trainer.errors import ConfigError
from weightsync.errors import StoreUnavailable
from weightsync.running import store_of

T = TypeVar("T")

FINITE = 1e300  # msgspec takes no infinite bound, and only a bound refuses what is infinite or no number
Count = Annotated[int, Meta(gt=0)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0.0, le=FINITE)]
NonNegative = Annotated[float, Meta(ge=0.0, le=FINITE)]
Finite = Annotated[float, Meta(ge=-FINITE, le=FINITE)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Coefficient = Annotated[float, Meta(ge=0.0, le=10.0)]
Text = Annotated[str, Meta(min_length=1)]
FunctionName = Annotated[str, Meta(pattern=r"^[^:]+:[^:]+\Z", description="Write package.module:function")]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section of a configuration. Types and ranges are checked by `convert`, not by the constructor."""


class Named(Section, frozen=True, tag_field="name"):
    """A section that its `name` chooses."""

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)


class Kind(Section, frozen=True, tag_field="kind"):
    """A section that its `kind` chooses."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class _Loader(yaml.SafeLoader):
    """Reads 3e-4 as a number, as YAML 1.2 does, and refuses a key that is written twice in one mapping: YAML takes the
    last, silently."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(name, f"is in lines {lines[name]} and {line}", "Write a key once")
            lines[name] = line
        return node


_Loader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse(text: str) -> Any:
    """Raises YAMLError, and ConfigError for a key that is written twice."""
    return _Loader(text).get_single_data()


def read(cls: type[T], path: str | Path, overrides: list[str] | None = None) -> T:
    """Read a YAML file and apply `a.b=c` overrides. Raises ConfigError naming the key that does not fit."""
    try:
        data = parse(Path(path).read_text())
    except OSError as error:
        raise ConfigError("", f"cannot read {path}: {error.strerror}", "Name an existing YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("", f"{path} is not YAML: {error}", "Correct the file") from None
    data = {} if data is None else data
    override(data, overrides or [])
    return build(cls, data)


def build(cls: type[T], data: object, key: str = "") -> T:
    """Build `cls` from a mapping. Raises ConfigError with the dotted key of the first value that does not fit."""
    built: T = convert(cls, data, key)
    return built


def convert(hint: Any, value: object, key: str) -> Any:
    """One value to its declared type. Integers are accepted for floats, lists for tuples; nothing else is coerced."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise _explained(error, hint, value, key) from None


def _explained(error: msgspec.ValidationError, hint: Any, value: object, key: str) -> ConfigError:
    """The refusal of msgspec: the place, the value there, and the values that may be."""
    placed = re.fullmatch(r"(.*) - at (`key` in )?`\$(.*)`", str(error), re.DOTALL)
    text, of_key, path = placed.groups() if placed else (str(error), None, "")
    key, cause = f"{key}{path}".removeprefix("."), error.__cause__
    if isinstance(cause, ConfigError):  # of a __post_init__, which does not know where it stands
        return ConfigError(_join(key, cause.key), cause.problem, cause.advice)
    if unknown := re.match("Object contains unknown field `(.*)`", text):
        return ConfigError(_join(key, unknown[1]), "unknown key", _did_you_mean(unknown[1], *_at(hint, value, path)))
    if missing := re.match("Object missing required field `(.*)`", text):
        key, path = _join(key, missing[1]), f"{path}.{missing[1]}"
    hint, value = _at(hint, value, path)
    choices = [choice for member in _members(hint) if get_origin(member) is Literal for choice in get_args(member)]
    described = [meta.description for each in (hint, *get_args(hint)) for meta in getattr(each, "__metadata__", ())]
    if choices:
        advice = f"Set it to one of: {', '.join(map(str, choices))}"
    elif any(described):
        (advice,) = described
    elif missing:
        advice = "This key has no default; set it"
    else:
        advice = text.split(", got ")[0].replace("`", "").replace("object", "mapping").replace("array", "list")
        advice += " as every key" if of_key else ""
    return ConfigError(key, "missing" if missing else f"cannot be {_shown(value)}", advice)


def _at(hint: Any, value: Any, path: str) -> tuple[Any, Any]:
    """The declared type and the value at a place such as `.rewards[0].kind`."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        members = _members(hint)
        if index:
            hint, value = get_args(members[0])[0], value[int(index)]
        elif name == members[0].__struct_config__.tag_field:
            hint, value = Literal[tuple(sorted(each.__struct_config__.tag for each in members))], value.get(name)
        else:
            hint, value = get_type_hints(_chosen(members, value), include_extras=True)[name], value.get(name)
    return hint, value


def _members(hint: Any) -> list[Any]:
    """The types of a union, without None and bounds."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [get_args(each)[0] if get_origin(each) is Annotated else each for each in members if each is not type(None)]


def _chosen(members: list[Any], value: Any) -> Any:
    """The struct that a mapping's tag names."""
    given = value.get(members[0].__struct_config__.tag_field)
    return next((each for each in members if each.__struct_config__.tag == given), members[0])


def override(data: Any, assignments: list[str]) -> None:
    """Apply `a.b=c` assignments to a parsed YAML mapping, in place. The right side is YAML too."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(assignment, "not an assignment", "Write --set section.key=value")
        node, *rest = data, *path.split(".")
        for name in rest[:-1]:
            node = node.setdefault(name, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ConfigError(path, "no such section", "The part before the last dot must name a section")
        node[rest[-1]] = parse(text)


def _join(key: str, name: str) -> str:
    return ".".join(part for part in (key, name) if part)


def _shown(value: object) -> str:
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def _did_you_mean(name: str, hint: Any, value: Any) -> str:
    struct = _chosen(_members(hint), value)
    known = [*filter(None, [struct.__struct_config__.tag_field]), *struct.__struct_fields__]
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean '{close[0]}'?" if close else f"Known keys here: {', '.join(known)}"


def load_target(target: str, key: str) -> Any:
    """The object that `package.module:name` names. Raises ConfigError."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(key, f"cannot import {target} ({error!r})", "Put it on PYTHONPATH") from None


def server(key: str, url: str, ca_file: str | None, cluster_tls: str | None) -> None:
    """Check a server's address, and that it goes with what its certificate is checked against."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(key, f"{url!r} is not an HTTP address", "Write http://host:port or https://host:port")
    if ca_file is not None and cluster_tls is not None:
        raise ConfigError("ca_file", "given beside cluster_tls, which has an authority of its own", "Leave one out")
    if (ca_file or cluster_tls) is not None and url.startswith("http://"):
        raise ConfigError(key, f"{url!r} is not encrypted, but has certificates", "Write https://host:port")


def found_store(model: str) -> str:
    """The URL of the store of the server that runs on this host, for a section that names none."""
    try:
        return store_of(model)
    except StoreUnavailable as error:
        raise ConfigError("store", f"missing, and {error.reason}", error.advice) from None


def key_in(path: str, key: str) -> str:
    """The key in a file, on one line."""
    try:
        found = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, f"cannot read {path} ({error})", "Name a file this process may read") from None
    if not found or not found.isascii() or not found.isprintable():
        raise ConfigError(key, f"{path} holds no key", "Write the key into it, on one line")
    return found
