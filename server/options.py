"""Options are declared once, in the configuration that they set, and everything else follows from that.

A field of a frozen dataclass is an option if its type is annotated with `Option`:

    keep_versions: Annotated[int, Option("versions kept staged")] = 2

From it follow the flag (`--keep-versions`), the environment variable (`HOTSWAP_GATEWAY_KEEP_VERSIONS`), the key in the
YAML file that `--config` names (`keep-versions`), and a row of docs/options.md. A flag goes before a variable, that
before the file, and that before the default. A field whose type is such a dataclass itself is a group of options.

`parse` reads a command line with argparse; server/cli/app.py makes Typer's parameters of the same settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from server.errors import ConfigError

T = TypeVar("T")
PREFIX = "HOTSWAP"
TRUE, FALSE = frozenset({"1", "true", "t", "yes", "y", "on"}), frozenset({"0", "false", "f", "no", "n", "off"})
CONFIG_HELP = "YAML file with any of these options, by their names without dashes in front"


@dataclass(frozen=True)
class Option:
    """The rest of an option, besides its field. Without `flag` it has the field's name, less a unit `_s` at the end.

    `env` names the variable where several commands share one. `read` makes the value of its text. A flag that begins
    with `--no-` sets its field to False; `negatable` gives a switch such a second flag. A `positional` option has no
    flag on the command line; Typer alone takes it. With a `panel`, that heading, Typer's `--help` leaves the option to
    `--help-all`.
    """

    help: str
    flag: str = ""
    env: str = ""
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    negatable: bool = False
    missing: str = ""  # what a command says if nobody gives it
    positional: bool = False
    panel: str = ""


@dataclass(frozen=True)
class Setting:
    """An option of one command. `path` leads to its field, through groups; `type` is that of one value."""

    command: str
    path: tuple[str, ...]
    option: Option
    type: type
    default: Any
    required: bool = False
    repeated: bool = False
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return self.option.flag or f"--{self.path[-1].removesuffix('_s').replace('_', '-')}"

    @property
    def name(self) -> str:
        """Its key in the YAML file."""
        return self.flag.removeprefix("--")

    @property
    def env(self) -> str:
        return self.option.env or "_".join((PREFIX, self.command, self.name)).replace("-", "_").upper()

    @property
    def inverted(self) -> bool:
        return self.type is bool and self.name.startswith("no-")

    def value(self, given: Any) -> Any:
        """The field's value, of text or of what YAML has made of it. Raises ConfigError."""
        if self.repeated:
            return tuple(
                self._one(one) for one in (given if isinstance(given, list | tuple) else str(given).split(","))
            )
        found = self._one(given)
        return not found if self.inverted else found

    def _one(self, given: Any) -> Any:
        if self.option.read is not None:
            return self.option.read(str(given))
        if self.type is bool:
            text = str(given).lower()
            if text not in TRUE | FALSE:
                raise ConfigError(f"{self.flag} {given}: must be true or false.")
            return text in TRUE
        try:
            found = self.type(given) if not isinstance(given, bool | list | dict) else None
        except ValueError:
            found = None
        if found is None or (self.type is int and isinstance(given, float)):
            raise ConfigError(f"{self.flag} {given}: must be {_NEEDED.get(self.type, 'one value')}.")
        if self.choices and found not in self.choices:
            raise ConfigError(f"{self.flag} {given}: must be one of {', '.join(self.choices)}.")
        return found


ClusterTlsDirectory = Annotated[
    Path | None, Option("directory with tls.crt, tls.key and ca.crt", env="HOTSWAP_CLUSTER_TLS")
]
_NEEDED: dict[type, str] = {int: "a whole number", float: "a number"}


def settings(command: str, config: type, _path: tuple[str, ...] = ()) -> tuple[Setting, ...]:
    """The options of `config`, a dataclass, in the order of its fields."""
    found: list[Setting] = []
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        hint, path = hints[field.name], (*_path, field.name)
        option = next((note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Option)), None)
        if option is not None:
            required = field.default is dataclasses.MISSING
            default = None if required else field.default
            found.append(Setting(command, path, option, default=default, required=required, **_shape(hint, option)))
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found.extend(settings(command, hint, path))
    return tuple(found)


def build(config: type[T], given: Mapping[str, Any], command: str = "", **others: Any) -> T:
    """A `config` of values by flag; `others` are fields that are no options. Its own checks raise ConfigError."""
    tree: dict[str, Any] = dict(others)
    for setting in settings(command, config):
        if setting.flag in given:
            group = tree
            for name in setting.path[:-1]:
                group = group.setdefault(name, {})
            group[setting.path[-1]] = given[setting.flag]
    return _built(config, tree)


def from_file(file: Path, declared: Sequence[Setting]) -> dict[str, Any]:
    """The settings of a YAML file, by flag, not yet converted. Raises ConfigError."""
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {file}: must hold one option a line, such as `port: 8000`.")
    names = {setting.name: setting.flag for setting in declared}
    for name in found:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1)
            meant = f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(names)}"
            raise ConfigError(f"--config {file}: no option is called {name}{meant}")
    return {names[name]: value for name, value in found.items() if value is not None}


def parse(
    declared: Sequence[Setting], argv: Sequence[str], parser: argparse.ArgumentParser | None = None
) -> dict[str, Any]:
    """Values by flag: of the command line, the environment, a file. Raises ConfigError; argparse ends bad usage."""
    parsed = vars((parser or arguments(declared)).parse_args(argv))
    given = from_file(parsed.pop("config"), declared) if "config" in parsed else {}
    args = {flag: tuple(value) if isinstance(value, list) else value for flag, value in parsed.items()}
    by_flag = {setting.flag: setting for setting in declared}
    given |= {setting.flag: os.environ[setting.env] for setting in declared if os.environ.get(setting.env)}
    values = {flag: by_flag[flag].value(value) for flag, value in given.items() if flag not in args} | args
    for setting in declared:
        if setting.required and setting.flag not in values:
            raise ConfigError(setting.option.missing or f"{setting.flag}: is needed; {setting.option.help}.")
    return values


def arguments(declared: Sequence[Setting], **about: Any) -> argparse.ArgumentParser:
    """A parser that returns what was given, by flag, and no defaults."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, **about)
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    for setting in declared:
        how: dict[str, Any] = {"dest": setting.flag, "help": _with_default(setting)}
        if setting.type is bool and setting.option.negatable:
            how |= {"action": argparse.BooleanOptionalAction}
        elif setting.type is bool:
            how |= {"action": "store_const", "const": not setting.inverted}
        else:
            how |= {"type": setting.option.read or setting.type, "metavar": setting.option.metavar or _metavar(setting)}
            how |= {"choices": setting.choices, "metavar": setting.option.metavar} if setting.choices else {}
            how |= {"action": "append"} if setting.repeated else {}
        parser.add_argument(setting.flag, **how)
    return parser


def flags(declared: Sequence[Setting], given: Mapping[str, Any]) -> list[str]:
    """The command line that says the same."""
    words: list[str] = []
    for setting in declared:
        value = given.get(setting.flag)
        if value is None:
            continue
        if setting.type is bool:
            other = [f"--no-{setting.name}"] if setting.option.negatable else []
            words += [setting.flag] if value is not setting.inverted else other
        else:
            for one in value if setting.repeated else (value,):
                words += [setting.flag, str(one)]
    return words


def table(declared: Sequence[Setting]) -> str:
    """The options as Markdown."""
    rows = ["| option | variable | default | |", "|---|---|---|---|"]
    for setting in declared:
        given = setting.type is not bool and setting.default not in (None, (), "")
        default = "needed" if setting.required else f"`{setting.default}`" if given else ""
        choices = f" (`{'`, `'.join(setting.choices)}`)" if setting.choices else ""
        flag = setting.name.upper() if setting.option.positional else setting.flag
        rows.append(f"| `{flag}` | `{setting.env}` | {default} | {setting.option.help}{choices} |")
    return "\n".join(rows) + "\n"


def _built(config: type[T], tree: Mapping[str, Any]) -> T:
    hints = get_type_hints(config)
    fields = {
        name: _built(hints[name], value) if isinstance(value, dict) and dataclasses.is_dataclass(hints[name]) else value
        for name, value in tree.items()
    }
    return config(**fields)


def _shape(hint: Any, option: Option) -> dict[str, Any]:
    """The shape of the values, as a type hint says it."""
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple:
        return _shape(get_args(hint)[0], option) | {"repeated": True}
    if get_origin(hint) is Literal:
        return {"type": str, "choices": get_args(hint)}
    return {"type": hint}


def _metavar(setting: Setting) -> str:
    return setting.flag.removeprefix("--").replace("-", "_").upper()


def _with_default(setting: Setting) -> str:
    if setting.default in (None, (), "") or setting.type is bool:
        return setting.option.help
    return f"{setting.option.help} (default: {setting.default})".replace("%", "%%")
