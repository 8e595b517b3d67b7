"""`hotswap answers`: what is kept of the answers to keys that have opted in."""

from __future__ import annotations

import json
import time
from collections import deque
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from server.answers import log, reading
from server.answers.reading import Wanted
from server.cli.admin import AsJson, StateDir
from server.cli.keys import seconds_of
from server.cli.output import console, table
from server.errors import CliError, ConfigError, as_cli_error
from server.gateway.config import GatewayConfig
from server.up.paths import ServerInfo, default_state_dir

app = typer.Typer(no_args_is_help=True)


class Rating(StrEnum):
    """A user's rating of an answer."""

    up = "up"
    down = "down"
    none = "none"


Where = Annotated[
    str | None,
    typer.Option(
        "--answers", envvar="HOTSWAP_GATEWAY_ANSWERS", help="where they are; default: of the server started here"
    ),
]
Key = Annotated[str | None, typer.Option(help="name or id of the key that got them")]
Since = Annotated[str | None, typer.Option(help="only of the last, such as 30d, 12h or 90m")]
MinVersion = Annotated[int | None, typer.Option(help="first version of the weights")]
MaxVersion = Annotated[int | None, typer.Option(help="last version of the weights")]
Rated = Annotated[Rating | None, typer.Option(help="only those rated so")]


@app.command("list")
def list_answers(
    answers: Where = None,
    key: Key = None,
    since: Since = None,
    min_version: MinVersion = None,
    max_version: MaxVersion = None,
    rating: Rated = None,
    last: Annotated[int, typer.Option(min=1, help="how many, the newest")] = 20,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """List the newest answers, and what was said of them."""
    wanted = _wanted(key, since, min_version, max_version, rating)
    with as_cli_error(ConfigError, OSError):
        found = deque(reading.rows(_url(answers, state_dir), wanted), maxlen=last)
    if as_json:
        print(json.dumps(list(found)))
        return
    shown = table("id", "time", "key", "route", "versions", "tokens", "score", "correction", "answer")
    for row in found:
        written = {span["version"] for span in row["weight_versions"]} or {row["first_version"]}
        cells = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])), row["key"], row["route"]]
        cells += [" ".join(map(str, sorted(v for v in written if v is not None)))]
        cells += ["" if row[name] is None else f"{row[name]:g}" for name in ("completion_tokens", "score")]
        shown.add_row(row["id"], *cells, "yes" if row["correction"] else "", _short(row["text"]))
    console().print(shown)


@app.command()
def export(
    target: Annotated[str, typer.Argument(help="file or fsspec URL: .parquet, or .jsonl")],
    answers: Where = None,
    key: Key = None,
    since: Since = None,
    min_version: MinVersion = None,
    max_version: MaxVersion = None,
    rating: Rated = None,
    state_dir: StateDir = None,
) -> None:
    """Write answers with what was said of them, a row for each choice, as Parquet or as JSON lines."""
    forms = {".parquet": reading.export_parquet, ".jsonl": reading.export_jsonl}
    write = next((write for suffix, write in forms.items() if target.endswith(suffix)), None)
    if write is None:
        raise CliError(f"{target}: the name must end in {' or '.join(forms)}")
    wanted = _wanted(key, since, min_version, max_version, rating)
    with as_cli_error(ConfigError, OSError):
        count = write(_url(answers, state_dir), wanted, target)
    console().print(f"{count} rows are in {target}")


@app.command()
def delete(
    key: Annotated[str, typer.Option(help="name or id of the key")], answers: Where = None, state_dir: StateDir = None
) -> None:
    """Delete what is kept of a key, and what is still being written of it up to now."""
    with as_cli_error(ConfigError, OSError):
        count = log.forget(_url(answers, state_dir), key)
    console().print(f"{count} records of {key} are gone; those that are being written now will not appear")


def _url(answers: str | None, state_dir: Path | None) -> str:
    if answers is not None:
        return answers
    info = ServerInfo.read(state_dir or default_state_dir(None))
    return GatewayConfig(store=info.store, model=info.model).answers_url


def _wanted(key: str | None, since: str | None, low: int | None, high: int | None, rating: Rating | None) -> Wanted:
    begin = time.time() - seconds_of("--since", since) if since is not None else None
    chosen: Any = rating.value if rating is not None else None
    return Wanted(key, begin, None, low, high, chosen)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
