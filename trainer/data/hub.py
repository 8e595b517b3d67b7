"""Data sets by their names on the Hugging Face hub, as files at a commit.

The library `datasets` resolves a name, a configuration and a split to files, by the repository's README or the names of
its files. The files are read from the hub as they are needed. With HF_HUB_OFFLINE=1 they are those that
`hf download --repo-type dataset NAME` has left on this machine.

The directory of a run's checkpoints keeps the commits that the run began with (`at_commits`), so that a resumed run
reads the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from msgspec.structs import replace

from trainer.config import ArrowData, CsvData, FileData, HubData, JsonlData, ParquetData, TrainerConfig, WebDatasetData
from trainer.data.storage import File, explained, file_at, find_files, of_client
from trainer.errors import DataError

COMMITS = "hub.json"  # in checkpoint.path
AWAY = "Check its page, the network and HF_ENDPOINT; without a network, download it and set HF_HUB_OFFLINE=1"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_KINDS: dict[str, type[FileData]] = {  # by the names of the library's builders
    "json": JsonlData,
    "csv": CsvData,
    "parquet": ParquetData,
    "arrow": ArrowData,
    "webdataset": WebDatasetData,
}
_REMEDIES: list[tuple[type[Exception], str]] = [  # the first that fits
    (GatedRepoError, "Ask for access on its page, and set HF_TOKEN to a token of that account"),
    (RepositoryNotFoundError, "Correct the name; if it is private, set HF_TOKEN, or run hf auth login"),
    (RevisionNotFoundError, "Correct data.revision"),
    (LocalEntryNotFoundError, "Run hf download --repo-type dataset with its name, or unset HF_HUB_OFFLINE"),
    (HFValidationError, "Write owner/name, or an existing directory"),
    (OSError, AWAY),
    (ValueError, "Correct data.config"),  # the library's words name the configurations
    (RuntimeError, "Set data.revision to refs/convert/parquet"),  # it is a script
]


def sources(config: FileData, part: str) -> tuple[list[File], FileData]:
    """The files of a part of the data, a path or a split, and the configuration to read them by. Raises DataError."""
    if not isinstance(config, HubData):
        return find_files(config.pattern(part)), config
    name = part.partition("[")[0]
    with _remedied(config.path):
        builder = _builder(config.path, config.config, config.revision)
    found = {str(split): urls for split, urls in (builder.config.data_files or {}).items()}
    if name not in found:
        raise DataError(f"{config.path} has no split {name!r}. Name one of these: {', '.join(found) or 'none'}.")
    if builder.name not in _KINDS:
        kinds = ", ".join(_KINDS)
        raise DataError(f"{config.path} has {builder.name} files, and these are read: {kinds}. Convert it to one.")
    with explained(config.path):
        files = [file_at(url) for url in found[name]]
    common = {name: getattr(config, name) for name in FileData.__struct_fields__}
    return files, _KINDS[builder.name](**common)


def window(config: FileData, part: str, count: int) -> range:
    """The places of `count` usable records that a part, such as the split `train[:5%]`, takes. Raises DataError."""
    if not isinstance(config, HubData) or "[" not in part:
        return range(count)
    from datasets import ReadInstruction

    try:
        (found,) = ReadInstruction.from_spec(part).to_absolute({part.partition("[")[0]: count})
    except (ValueError, AssertionError) as error:
        advice = "Write NAME, NAME[10:20] or NAME[:5%], of one split"
        raise DataError(f"{part!r} is no part of {count} records ({error}). {advice}.") from None
    return range(found.from_, found.to)


def at_commits(config: TrainerConfig, *, keep: bool) -> TrainerConfig:
    """The configuration with each data set of the hub at a commit: the one that the run to be resumed began with, else
    the newest of its revision, which is kept then if it is to be. Raises DataError."""
    kept = config.checkpoint
    path = Path(kept.path) / COMMITS if kept is not None else None
    known: dict[str, str] = {}
    with explained(str(path)):
        if path is not None and kept is not None and kept.resume != "never" and path.exists():
            known = json.loads(path.read_text())
        before, sets = dict(known), [replace(entry, data=_at(entry.data, known)) for entry in config.eval]
        config = replace(config, data=_at(config.data, known), eval=tuple(sets))
        if path is not None and keep and known != before:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_text(json.dumps(known))
            path.with_suffix(".new").rename(path)
    return config


def _at(data: Any, known: dict[str, str]) -> Any:
    """A data set's configuration at its commit, which is put among the known ones."""
    if not isinstance(data, HubData) or Path(data.path).is_dir():
        return data
    key = f"{data.path}@{data.revision or ''}"
    if key not in known:
        with _remedied(data.path):
            known[key] = _commit(data.path, data.revision)
    return replace(data, revision=known[key])


@functools.lru_cache(maxsize=8)
def _builder(path: str, config: str | None, revision: str | None) -> Any:
    """The library's builder, which knows the files of each split."""
    import datasets  # takes a second, and few need it

    if Path(path).is_dir():
        return datasets.load_dataset_builder(path, config)
    commit = _commit(path, revision)
    if hub.is_offline_mode():
        return datasets.load_dataset_builder(_downloaded(path, commit), config)
    builder = datasets.load_dataset_builder(path, config, revision=commit)
    if builder.hash != commit:  # where the hub fails, the library takes what it has kept of any commit
        raise ConnectionError("the hub failed in between")
    return builder


def _commit(path: str, revision: str | None) -> str:
    if "/" not in path:
        raise HFValidationError("it has no owner, and is no directory")
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    if hub.is_offline_mode():
        return Path(_downloaded(path, revision)).name
    return str(hub.HfApi().dataset_info(path, revision=revision).sha)


def _downloaded(path: str, revision: str | None) -> str:
    return str(hub.snapshot_download(path, repo_type="dataset", revision=revision, local_files_only=True))


@contextlib.contextmanager
def _remedied(name: str) -> Iterator[None]:
    """Errors of the hub and its libraries, as DataError."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{name} is read with the package datasets ({error}). Install it: pip install datasets"
        ) from None
    except Exception as error:
        remedies = [remedy for kind, remedy in _REMEDIES if isinstance(error, kind)]
        if not remedies and not of_client(error):
            raise
        remedy = remedies[0] if remedies else AWAY
        problem = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"cannot read the data set {name} ({problem}). {remedy}.") from error
