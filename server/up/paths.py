"""The directory in which `hotswap up` keeps its state, and how other commands find a running server."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from server.errors import CliError, ModelNotFound
from server.files import write_file

STATE_ENV = "HOTSWAP_STATE_DIR"


@dataclass(frozen=True)
class ServerInfo:
    """The content of server.json, which `up` writes: where the gateway listens, its store, and which file holds the
    admin key. `state`: "starting" until every instance serves, then "ready"."""

    url: str
    admin_url: str
    model: str
    store: str
    admin_key_file: str
    pid: int
    state: str = "ready"

    def write(self, state_dir: Path) -> None:
        write_file(state_dir / "server.json", json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, state_dir: Path) -> ServerInfo:
        try:
            return cls(**json.loads((state_dir / "server.json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CliError(
                f"no running server is described in {state_dir}: start `hotswap up`, or name its --state-dir"
            ) from error


def state_root() -> Path:
    """HOTSWAP_STATE_DIR, else the user's state directory."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get(STATE_ENV) or Path(base) / "hotswap")


def default_state_dir(name: str | None) -> Path:
    """The state directory of model `name`; without a name, of the only (or latest) server started here."""
    root = state_root()
    if name is not None:
        return root / name
    running = sorted(root.glob("*/server.json"), key=lambda p: p.stat().st_mtime)
    if not running:
        raise CliError(f"no server was started with its state under {root}; start `hotswap up` or pass --state-dir")
    return running[-1].parent


def resolve_model(model: str) -> Path:
    """The checkpoint directory for `model`: a path, or a name looked up in the local cache, then on the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} holds no config.json: --model wants a Hugging Face checkpoint directory")
        return path.resolve()
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"{path} does not exist: --model wants a Hugging Face checkpoint directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model))
    except Exception as error:
        raise ModelNotFound(
            f"{model!r} is neither a directory nor a model that could be fetched ({type(error).__name__}); "
            "give a checkpoint directory"
        ) from error
