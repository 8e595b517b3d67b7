"""`hotswap weights`: the admin API of a running gateway, from the shell."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from server.cli.errors import RequestFailed
from server.cli.paths import ServerInfo, default_state_dir

SWAP_TIMEOUT_S = 900.0  # a push reads a whole checkpoint
app = typer.Typer(no_args_is_help=True)
StateDir = Annotated[Path | None, typer.Option(help="state directory of `up`; default: the latest server started here")]
Url = Annotated[str | None, typer.Option(envvar="HOTSWAP_URL", help="gateway; default: from the state directory")]
KeyFile = Annotated[Path | None, typer.Option(envvar="HOTSWAP_ADMIN_KEY_FILE", help="file with the admin key")]


class AdminClient:
    """The gateway's /admin routes with the admin key of a running server."""

    def __init__(self, state_dir: Path | None, url: str | None = None, key_file: Path | None = None) -> None:
        if url is None or key_file is None:
            info = ServerInfo.read(state_dir or default_state_dir(None))
            url, key_file = url or info.url, key_file or Path(info.admin_key_file)
        try:
            key = os.environ.get("HOTSWAP_ADMIN_KEY") or key_file.read_text().strip()
        except OSError as error:
            raise RequestFailed(f"the admin key file {key_file} cannot be read ({error.strerror})") from error
        self._http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=SWAP_TIMEOUT_S)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer; RequestFailed carries the gateway's own message."""
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise RequestFailed(f"no answer from {self._http.base_url}: {error}; is `hotswap up` running?") from error
        payload = answer.json() if answer.content else {}
        if answer.is_error:
            raise RequestFailed(payload.get("error", {}).get("message") or f"{path}: HTTP {answer.status_code}")
        return payload


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory")],
    activate: Annotated[bool, typer.Option(help="also swap it in")] = True,
    state_dir: StateDir = None,
    url: Url = None,
    admin_key_file: KeyFile = None,
) -> None:
    """Publish a checkpoint as a new version and, unless --no-activate, swap it in."""
    body = {"path": str(directory.expanduser().resolve()), "activate": activate}
    _show_swap(AdminClient(state_dir, url, admin_key_file).call("POST", "/admin/weights", body))


@app.command("list")
def list_versions(state_dir: StateDir = None, url: Url = None, admin_key_file: KeyFile = None) -> None:
    """List the versions held."""
    answer = AdminClient(state_dir, url, admin_key_file).call("GET", "/admin/weights")
    table = Table("version", "state", "active", "step", "GB", "published", "source")
    active = (answer.get("active") or {}).get("version")
    for v in answer["versions"]:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(v["created_at"]))
        mark = "active" if v["version"] == active else ""
        size = f"{v['nbytes'] / 1e9:.3f}"
        table.add_row(str(v["version"]), v["state"], mark, str(v["step"] or ""), size, made, v.get("source") or "")
    Console().print(table)


@app.command()
def activate(
    version: Annotated[int, typer.Argument(help="a version from `hotswap weights list`")],
    state_dir: StateDir = None,
    url: Url = None,
    admin_key_file: KeyFile = None,
) -> None:
    """Swap a published version in."""
    client = AdminClient(state_dir, url, admin_key_file)
    _show_swap(client.call("POST", "/admin/weights/activate", {"version": version}))


@app.command()
def rollback(state_dir: StateDir = None, url: Url = None, admin_key_file: KeyFile = None) -> None:
    """Go back to the version that served before the active one."""
    _show_swap(AdminClient(state_dir, url, admin_key_file).call("POST", "/admin/weights/rollback"))


def show_instances(state_dir: Path) -> None:
    """Print every instance with its state, versions and last swap times."""
    rows = AdminClient(state_dir).call("GET", "/admin/instances")["instances"]
    table = Table("instance", "state", "version", "staged", "kernels", "staging ms", "commit ms", "error")
    for r in rows:
        error = (r.get("error") or {}).get("message", "")
        times = [f"{r[k]:.2f}" if r.get(k) else "" for k in ("stage_ms", "commit_ms")]
        cells = [r["id"], r["state"], r.get("active_version"), r.get("staged_version"), r.get("path"), *times, error]
        table.add_row(*(str(c) if c is not None else "" for c in cells))
    Console().print(table)


def _show_swap(answer: dict[str, Any]) -> None:
    swap = answer.get("swap") or answer
    if swap.get("prepare_ms") is None:
        Console().print(f"published version {answer.get('version')}")
        return
    Console().print(
        f"version {swap['version']} is active (before: {swap.get('previous')}); "
        f"staged in {swap['prepare_ms']:.0f} ms, committed in {swap['commit_ms']:.1f} ms"
    )
