"""Files of the keys: what they have uploaded to train on, and what jobs have measured.

A file is in the server's directory before its record is in the journal, so a record without a file is not seen, and a
file without a record goes away at the next start.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any, BinaryIO, Final

from trainer.api.config import ApiConfig
from trainer.api.errors import ApiError
from trainer.api.finetuning.examples import check_file
from trainer.api.journal import Journal, Record
from trainer.api.states import settle

FILE: Final = "file"  # the kind of its records
UPLOADED, RESULTS = "fine-tune", "fine-tune-results"  # the purposes


class Files:
    """The methods of this class wait for the disk: call them on a thread."""

    def __init__(self, config: ApiConfig, journal: Journal) -> None:
        self._journal, self._limits = journal, config.limits
        self._directory = Path(config.directory) / "files"
        self._directory.mkdir(exist_ok=True, mode=0o700)
        for path in self._directory.iterdir():
            if journal.get(FILE, path.name) is None:
                path.unlink()

    def keep(self, owner: str, name: str, purpose: str, content: BinaryIO) -> Record:
        """Check an upload and keep it. Raises ApiError (400)."""
        if purpose != UPLOADED:
            raise ApiError(400, f"the purpose {purpose!r} is nothing here: use {UPLOADED!r}", "bad_purpose", "purpose")
        most = self._limits.files
        if sum(found.about["purpose"] == UPLOADED for found in self._journal.of_owner(FILE, owner)) >= most:
            raise ApiError(400, f"this key has {most} files, which is the limit: delete one", "too_many_files", "file")
        identity = f"file-{uuid.uuid4().hex}"
        beside = self._directory / f".{identity}.new"
        try:
            with beside.open("wb") as file:
                shutil.copyfileobj(content, file)
            method = check_file(beside)
            settle(beside, self._directory / identity)
        finally:
            beside.unlink(missing_ok=True)
        made = self._about(identity, name, purpose) | {"method": method}
        record = Record(FILE, identity, owner, about=made)
        self._journal.put(record)
        return record

    def write_results(self, owner: str, identity: str, name: str, content: bytes) -> Record:
        """The record of a file that is now on disk, for the journal."""
        beside = self._directory / f".{identity}.new"
        beside.write_bytes(content)
        settle(beside, self._directory / identity)
        return Record(FILE, identity, owner, about=self._about(identity, name, RESULTS))

    def find(self, owner: str, identity: str, param: str | None = None) -> Record:
        """One of the key's own. Raises ApiError (404)."""
        found = self._journal.get(FILE, identity)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no file {identity!r} of this key: upload one first", param=param)
        return found

    def path(self, identity: str) -> Path:
        return self._directory / identity

    def delete(self, owner: str, identity: str) -> None:
        """Raises ApiError (404)."""
        self.find(owner, identity)
        self._journal.remove(FILE, identity)
        self.path(identity).unlink(missing_ok=True)

    def _about(self, identity: str, name: str, purpose: str) -> dict[str, Any]:
        return {"filename": name, "purpose": purpose, "bytes": self.path(identity).stat().st_size}


def described(record: Record) -> dict[str, Any]:
    """OpenAI's file object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.about["bytes"],
        "created_at": int(record.made),
        "expires_at": None,
        "filename": record.about["filename"],
        "purpose": record.about["purpose"],
        "status": "processed",
        "status_details": None,
    }
