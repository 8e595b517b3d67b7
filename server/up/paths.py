"""The directory in which `hotswap up` keeps its state, and how other commands find a running server."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

from server.errors import CliError
from server.files import write_file
from weightsync import running


class ServerInfo(running.ServerInfo):
    """server.json, which `up` writes."""

    def write(self, state_dir: Path) -> None:
        write_file(state_dir / "server.json", json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, state_dir: Path) -> ServerInfo:
        try:
            return cls(**asdict(running.info_of(state_dir)))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CliError(
                f"no running server is described in {state_dir}: start `hotswap up`, or name its --state-dir"
            ) from error


def default_state_dir(name: str | None) -> Path:
    """The state directory of model `name`; without a name, of the only (or latest) server started here."""
    root = running.state_root()
    if name is not None:
        return root / readable(name)
    if not (started := running.state_dirs()):
        raise CliError(f"no server was started with its state under {root}; start `hotswap up` or pass --state-dir")
    return started[-1]


def readable(name: str) -> str:
    """A name for files and processes, another one for every name of a model."""
    plain = re.sub("[^A-Za-z0-9._-]", "-", name)[:64]
    return plain if plain == name else f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def resolve_model(model: str) -> Path:
    """The checkpoint directory for `model`: a path, or a name looked up in the local cache, then on the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CliError(f"{path} holds no config.json: --model wants a Hugging Face checkpoint directory")
        return path.resolve()
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CliError(f"{path} does not exist: --model wants a Hugging Face checkpoint directory")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model))
    except Exception as error:
        raise CliError(f"{model!r} is no directory, and {_not_fetched(model, error)}") from error


def _not_fetched(model: str, error: Exception) -> str:
    """State and remedy, of what `snapshot_download` raised."""
    from huggingface_hub import constants, errors

    hub, other = constants.ENDPOINT, "set HF_HOME to the place of a cache that holds it, or name a checkpoint directory"
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    match cause:
        case errors.HFValidationError():
            return "no name of a model: name a checkpoint directory, or a model as OWNER/NAME"
        case errors.GatedRepoError():
            account = f"accept them at {hub}/{model}, and set HF_TOKEN to a token of that account"
            return f"{hub} gives it to those alone that have accepted its terms: {account}"
        case errors.RepositoryNotFoundError():
            return f"{hub} has no such model, or a private one: check the name, or set HF_TOKEN to one that may read it"
        case errors.HfHubHTTPError() if cause.response.status_code == 401:
            return f"{hub} refuses the token: set HF_TOKEN to one that is valid, or name a checkpoint directory"
        case errors.HfHubHTTPError():
            return f"{hub} answers HTTP {cause.response.status_code}: try again, {other}"
        case _ if error is cause:
            return f"it could not be fetched ({type(error).__name__}: {' '.join(str(error).split())}): {other}"
    missing = f"it is not wholly in the cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return f"{missing}, and HF_HUB_OFFLINE keeps it from being fetched: unset it, {other}"
    return f"{missing}, and {hub} cannot be reached ({cause}): check the network, or HF_ENDPOINT for a mirror, {other}"
