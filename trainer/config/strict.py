"""Mappings into frozen dataclasses, strictly: every key must be known and every value must have its declared type.

A field whose type is a union of dataclasses is chosen by its first field, a `Literal` tag:
`algorithm: {name: grpo, ...}` becomes the dataclass whose `name` is `Literal["grpo"]`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from trainer.errors import ConfigError

T = TypeVar("T")


class _Once(yaml.SafeLoader):
    """Refuses a key that is written twice in one mapping: YAML takes the last, silently."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(name, f"is in lines {lines[name]} and {line}", "Write a key once")
            lines[name] = line
        return node


def read(cls: type[T], path: str | Path, overrides: list[str] | None = None) -> T:
    """Read a YAML file and apply `a.b=c` overrides. Raises ConfigError naming the key that does not fit."""
    try:
        data = _Once(Path(path).read_text()).get_single_data()
    except OSError as error:
        raise ConfigError("", f"cannot read {path}: {error.strerror}", "Name an existing YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("", f"{path} is not YAML: {error}", "Correct the file") from None
    data = {} if data is None else data
    override(data, overrides or [])
    return build(cls, data)


def build(cls: type[T], data: object, key: str = "") -> T:
    """Build `cls` from a mapping. Raises ConfigError with the dotted key of the first value that does not fit."""
    if not isinstance(data, Mapping):
        raise ConfigError(key, f"expected a mapping, got {_shown(data)}", "Write its keys below it, indented")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in data:
        if name not in fields:
            raise ConfigError(_join(key, str(name)), "unknown key", _did_you_mean(str(name), fields))
    values = {name: convert(hints[name], value, _join(key, name)) for name, value in data.items()}
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(_join(key, name), "missing", "This key has no default; set it")
    try:
        return cls(**values)
    except ConfigError as error:  # raised by __post_init__, which does not know where it stands
        raise ConfigError(_join(key, error.key), error.problem, error.advice) from None


def convert(hint: Any, value: object, key: str) -> Any:
    """One value to its declared type. Integers are accepted for floats, lists for tuples; nothing else is coerced."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, key)
    if origin is Literal:
        return _convert_literal(get_args(hint), value, key)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(key, f"expected a mapping, got {_shown(value)}", "Write its keys below it, indented")
        return dict(value)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(key, f"expected a list, got {_shown(value)}", "Write it as a YAML list")
        return tuple(convert(get_args(hint)[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return build(hint, value, key)  # type: ignore[arg-type]
    return _convert_scalar(hint, value, key)


def _convert_scalar(hint: Any, value: object, key: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 3e-4 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if type(value) is not hint:
        raise ConfigError(
            key, f"expected {hint.__name__}, got {_shown(value)}", f"Give a value of type {hint.__name__}"
        )
    return value


def _convert_literal(allowed: tuple[Any, ...], value: object, key: str) -> Any:
    if value not in allowed:
        choices = ", ".join(str(a) for a in allowed)
        raise ConfigError(key, f"{_shown(value)} is not one of {choices}", "Choose one of these")
    return value


def _convert_union(members: tuple[Any, ...], value: object, key: str) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(m for m in members if m is not type(None))
    if len(members) == 1:
        return convert(members[0], value, key)
    if not isinstance(value, Mapping):
        raise ConfigError(key, f"expected a mapping, got {_shown(value)}", "Write its keys below it, indented")
    tag = dataclasses.fields(members[0])[0].name
    by_tag = {get_args(get_type_hints(m)[tag])[0]: m for m in members}
    if value.get(tag) not in by_tag:
        choices = ", ".join(sorted(by_tag))
        raise ConfigError(_join(key, tag), f"{_shown(value.get(tag))} is not known", f"Set it to one of: {choices}")
    return build(by_tag[value[tag]], value, key)


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
        node[rest[-1]] = yaml.safe_load(text)


def _join(key: str, name: str) -> str:
    return ".".join(part for part in (key, name) if part)


def _shown(value: object) -> str:
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean '{close[0]}'?" if close else f"Known keys here: {', '.join(known)}"


def positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(name, f"must be positive, got {value}", "Give a value above 0")


def in_range(section: object, name: str, low: float, high: float) -> None:
    value = getattr(section, name)
    if not low <= value <= high:
        raise ConfigError(name, f"must be in [{low}, {high}], got {value}", "Give a value in that range")


def names_code(section: object, name: str, what: str) -> None:
    """Check that a value has the form of code's address. `load_target` imports it."""
    value = getattr(section, name)
    if value.count(":") != 1:
        raise ConfigError(name, f"{value!r} names no {what}", f"Write package.module:{what}")


def load_target(target: str, key: str) -> Any:
    """What `package.module:name` names. Raises ConfigError."""
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


def key_in(path: str, key: str) -> str:
    """The key in a file, on one line."""
    try:
        found = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, f"cannot read {path} ({error})", "Name a file this process may read") from None
    if not found or not found.isascii() or not found.isprintable():
        raise ConfigError(key, f"{path} holds no key", "Write the key into it, on one line")
    return found
