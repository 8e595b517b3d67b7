"""Unpacks what `python -m loadtest.gpu_day.pack` made: `python3 unpack.py DIR... TARGET`; needs Python alone.

The parts may lie in several directories, as they came. Each is checked against its digest before anything is written.
TARGET then has `repo` (the sources), `site` (the packages) and `run.sh`.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

MANIFEST = "pack.json"
CHUNK = 1 << 20


class PackError(Exception):
    """A pack cannot be unpacked; the message names the part and says what to do."""


def digest_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            found.update(piece)
    return found.hexdigest()


def checked(directories: Sequence[Path]) -> tuple[dict[str, Any], list[Path]]:
    """The manifest, and its parts in order. Raises PackError."""
    manifests = [d / MANIFEST for d in directories if (d / MANIFEST).is_file()]
    if not manifests:
        raise PackError(f"no {MANIFEST} in {_list(directories)}: transfer it with the parts")
    manifest: dict[str, Any] = json.loads(manifests[0].read_text())
    found = []
    total = len(manifest["parts"])
    for number, part in enumerate(manifest["parts"], 1):
        path = next((d / part["name"] for d in directories if (d / part["name"]).is_file()), None)
        if path is None:
            where = _list(directories)
            raise PackError(f"part {number} of {total}, {part['name']}, is missing in {where}: transfer it, too")
        if path.stat().st_size != part["nbytes"] or digest_of(path) != part["sha256"]:
            raise PackError(f"part {number} of {total}, {path}, is not what was packed: transfer it again")
        found.append(path)
    return manifest, found


def unpack(directories: Sequence[Path], target: Path) -> dict[str, Any]:
    """Raises PackError."""
    manifest, parts = checked(directories)
    target.mkdir(parents=True, exist_ok=True)
    for name in ("repo", "wheels", "site"):
        shutil.rmtree(target / name, ignore_errors=True)
    with tarfile.open(fileobj=io.BufferedReader(Joined(parts), CHUNK), mode="r|") as archive:
        archive.extractall(target, filter="data")
    (target / "site").mkdir()
    for wheel in sorted((target / "wheels").glob("*.whl")):
        install(wheel, target / "site")
    shutil.rmtree(target / "wheels", ignore_errors=True)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if manifest["python"] != here:
        print(f"unpack: the packages are for Python {manifest['python']}, and this is {here}", file=sys.stderr)
    return manifest


def install(wheel: Path, site: Path) -> None:
    """What pip would put beside other packages; commands are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            first, _, rest = member.filename.partition("/")
            if first.endswith(".data"):
                kind, _, rest = rest.partition("/")
                if kind not in ("purelib", "platlib") or not rest:
                    continue
                member.filename = rest
            archive.extract(member, site)


class Joined(io.RawIOBase):
    """The parts as one file."""

    def __init__(self, parts: Iterable[Path]) -> None:
        self._pieces = self._read(parts)
        self._rest = memoryview(b"")

    @staticmethod
    def _read(parts: Iterable[Path]) -> Iterator[bytes]:
        for part in parts:
            with part.open("rb") as file:
                while piece := file.read(CHUNK):
                    yield piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _list(directories: Iterable[Path]) -> str:
    return ", ".join(str(directory) for directory in directories)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    *directories, target = map(Path, arguments)
    try:
        manifest = unpack(directories, target)
    except PackError as error:
        print(f"unpack: {error}", file=sys.stderr)
        return 1
    print(f"{len(manifest['packages'])} packages and revision {manifest['revision']} are in {target}")
    print(f"run: {target / 'run.sh'} all --json FILE")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
