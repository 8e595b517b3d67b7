"""An option is declared once: flag, environment variable, YAML file and documentation say the same of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from scripts import options as documentation
from server import options
from server.cli import commands
from server.errors import CliError, ConfigError
from server.options import Option

STARTS = ()  # `up` starts nothing here


@dataclass(frozen=True)
class Group:
    hold_s: Annotated[float, Option("seconds")] = 5.0
    mode: Annotated[Literal["same", "any"], Option("which", "--failover")] = "same"


@dataclass(frozen=True)
class Config:
    model: Annotated[str, Option("name")]
    port: Annotated[int, Option("port")] = 8000
    file: Annotated[Path | None, Option("a file", env="HOTSWAP_SHARED")] = None
    loud: Annotated[bool, Option("say more")] = False
    careful: Annotated[bool, Option("do not", "--no-care")] = True
    pages: Annotated[tuple[str, ...], Option("pages", "--page")] = ()
    group: Group = Group()
    inner: int = 3  # no option


DECLARED = options.settings("gateway", Config)


def config(*argv: str) -> Config:
    return options.build(Config, options.parse(DECLARED, argv))


def typer_app(kind: Any, declared: Any) -> tuple[typer.Typer, list[Any]]:
    """With one command; and what it makes of its options each time that it is called."""
    app, made = typer.Typer(), list[Any]()

    @app.command()
    @commands.takes(declared)
    def command(context: typer.Context, given: dict[str, Any]) -> None:
        made.append(options.build(kind, given))

    return app, made


def typed(*argv: str) -> Config:
    """The same with Typer."""
    app, made = typer_app(Config, DECLARED)
    done = CliRunner().invoke(app, list(argv))
    if isinstance(done.exception, CliError):
        raise ConfigError(str(done.exception))
    assert done.exit_code == 0, done.output
    return made[0]


@pytest.mark.parametrize("parse", [config, typed])
def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(
    parse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: m\nport: 1\nhold: 2\nfailover: any\npage: [a, b]\nno-care: true\nloud: false\n")
    given = parse("--config", str(file))
    assert given == Config("m", 1, careful=False, pages=("a", "b"), group=Group(2.0, "any"))
    monkeypatch.setenv("HOTSWAP_GATEWAY_PORT", "2")
    monkeypatch.setenv("HOTSWAP_GATEWAY_LOUD", "true")
    monkeypatch.setenv("HOTSWAP_SHARED", "/x")
    given = parse("--config", str(file), "--hold", "3", "--page", "c")
    assert given == Config("m", 2, Path("/x"), True, False, ("c",), Group(3.0, "any"))
    assert parse("--config", str(file), "--port", "3").port == 3
    monkeypatch.setenv("HOTSWAP_GATEWAY_PORT", "")
    assert parse("--model", "n").port == 8000


@pytest.mark.parametrize("parse", [config, typed])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "one option a line"),
        ("a: b: c\n", "mapping values"),
        ("model: m\nprot: 1\n", "no option is called prot; did you mean port?"),
        ("model: m\ninner: 1\n", "no option is called inner"),
    ],
)
def test_a_file_that_cannot_be_meant_so_is_refused(parse: Any, text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        parse("--config", str(file))
    with pytest.raises(ConfigError, match="No such file"):
        parse("--config", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port: abc", "--port abc: must be a whole number"),
        ("port: 1.5", "must be a whole number"),
        ("port: [1]", "must be a whole number"),
        ("hold: true", "--hold True: must be a number"),
        ("failover: none", "must be one of same, any"),
        ("loud: 2", "must be true or false"),
    ],
)
def test_a_value_of_another_type_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(f"model: m\n{text}\n")
    with pytest.raises(ConfigError, match=says):
        config("--config", str(file))


@dataclass(frozen=True)
class Place:
    source: Annotated[str, Option("where", positional=True)]


def test_an_argument_has_no_flag_and_may_come_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = options.settings("follow", Place)
    app, made = typer_app(Place, declared)
    (file := tmp_path / "options.yaml").write_text("source: of the file\n")
    assert CliRunner().invoke(app, []).exit_code == 2
    for words, variable, source in (
        (["given"], "", "given"),
        (["--config", str(file)], "", "of the file"),
        (["--config", str(file)], "of the variable", "of the variable"),
        (["--config", str(file), "given"], "of the variable", "given"),
    ):
        monkeypatch.setenv("HOTSWAP_FOLLOW_SOURCE", variable)
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, made[-1:]) == (0, [Place(source)]), done.output
    assert "| `SOURCE` | `HOTSWAP_FOLLOW_SOURCE` | needed | where |" in options.table(declared)


def test_what_is_needed_and_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="--model: is needed"):
        config()


def test_a_command_line_can_be_made_of_values() -> None:
    words = ["--model", "m", "--no-care", "--page", "a", "--page", "b", "--hold", "3.0"]
    assert options.flags(DECLARED, options.parse(DECLARED, words)) == words


def test_no_two_options_of_a_command_share_a_name() -> None:
    for declared in (commands.UP, commands.GATEWAY, commands.INSTANCE, commands.FOLLOW, commands.DOCTOR):
        for names in ([s.flag for s in declared], [s.env for s in declared]):
            assert len(set(names)) == len(names)


def test_the_page_is_what_the_declarations_say() -> None:
    assert documentation.PAGE.read_text() == documentation.page(), "run python scripts/options.py"


def test_up_passes_on_every_option_of_the_gateway_but_a_check_and_its_own() -> None:
    assert {s.flag for s in commands.GATEWAY} - {s.flag for s in commands.UP} == {"--check"}
    given = {s.flag: _another(s) for s in commands.PASSED_ON}
    words = ["--store", "sqlite:///s.db", "--model", "m", *options.flags(commands.PASSED_ON, given)]
    values = options.parse(commands.GATEWAY, words)
    assert {flag: values[flag] for flag in given} == given


def _another(setting: options.Setting) -> Any:
    """Than the default."""
    if setting.type is bool:
        return not setting.default
    one = setting.choices[-1] if setting.choices else setting.type("2")
    return (one,) if setting.repeated else one


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_passed_on_either_way(value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_GATEWAY_REQUIRE_KEY", str(not value))
    words = ["--store", "s", *options.flags(commands.PASSED_ON, {"--require-key": value})]
    assert options.parse(commands.GATEWAY, words)["--require-key"] is value


def test_a_switch_that_turns_off_is_on_by_default() -> None:
    assert typed("--model", "m").careful
    assert not typed("--model", "m", "--no-care").careful
