"""The servers that `hotswap up` runs on this host, as each describes itself in its state directory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

from weightsync.errors import StoreUnavailable

STATE_ENV = "HOTSWAP_STATE_DIR"
STORE_ENV = "HOTSWAP_STORE"


@dataclass(frozen=True)
class ServerInfo:
    """The content of server.json: where the gateway listens, its store, and which file holds the admin key. `model` is
    the first of `models`. `state`: "starting" until every instance serves, then "ready". `certificate`: the file of the
    one that both ports show, where they speak TLS."""

    url: str
    admin_url: str
    model: str
    store: str
    admin_key_file: str
    pid: int
    state: str = "ready"
    models: tuple[str, ...] = ()
    certificate: str = ""


def info_of(state_dir: Path) -> ServerInfo:
    """Raises OSError, ValueError, TypeError or AttributeError, unless there is a description."""
    said = json.loads((state_dir / "server.json").read_text())
    known = {field.name: said[field.name] for field in fields(ServerInfo) if field.name in said}
    return ServerInfo(**{**known, "models": tuple(known.get("models", ()))})


def state_root() -> Path:
    """HOTSWAP_STATE_DIR, else the user's state directory."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get(STATE_ENV) or Path(base) / "hotswap")


def state_dirs() -> list[Path]:
    """Of the servers that were started under `state_root`, the latest last; one that was killed is among them."""
    return [file.parent for file in sorted(state_root().glob("*/server.json"), key=lambda p: p.stat().st_mtime)]


def servers() -> list[ServerInfo]:
    """Those that run here now, the latest last."""
    return [info for info in map(_described, state_dirs()) if info is not None]


def store_of(model: str) -> str:
    """The URL of the store of the only server that runs here; of several, of the only one with that model. Raises
    StoreUnavailable."""
    here = servers()
    names = [name for info in here for name in info.models or (info.model,)]
    if len(here) > 1:
        here = [info for info in here if model in (info.models or (info.model,))]
    if len(here) == 1:
        return here[0].store
    found = f"no server runs with its state under {state_root()}"
    if names:
        which = "several" if here else "none"
        found = f"{which} of the servers that run here have the model {model!r} (they serve {', '.join(sorted(names))})"
    raise StoreUnavailable("(none)", found, f"Start `hotswap up`, or pass the store's URL, or set {STORE_ENV}")


def _described(state_dir: Path) -> ServerInfo | None:
    """None if the server does not run."""
    try:
        info = info_of(state_dir)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return info if Path(f"/proc/{info.pid}").exists() else None
