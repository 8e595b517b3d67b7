"""A hub for tests: the routes by which the hub's own libraries find and read data sets, over files in a directory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

TOKEN = "hf_of_the_owner"


class Hub:
    """Data sets `owner/name`, each with commits, of which the last is `main`. `lost`: requests fail from now on, as
    those to a hub whose servers fail do."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.commits: dict[str, list[str]] = {}
        self.closed: dict[str, str] = {}  # by name: private, or gated
        self.lost = False
        self.app = FastAPI()
        self.app.get("/api/datasets/{owner}/{name}")(self._info)
        self.app.get("/api/datasets/{owner}/{name}/revision/{revision}")(self._info)
        self.app.get("/api/datasets/{owner}/{name}/tree/{revision}")(self._tree)
        self.app.get("/api/datasets/{owner}/{name}/tree/{revision}/{path:path}")(self._tree)
        self.app.api_route("/datasets/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])(
            self._file
        )
        self.app.middleware("http")(self._door)

    def commit(self, name: str, files: dict[str, str | bytes]) -> str:
        """A commit of these files and no others."""
        commits = self.commits.setdefault(name, [])
        commits.append(hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest())
        for path, content in files.items():
            file = self._directory / commits[-1] / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return commits[-1]

    async def _door(self, request: Request, further: Any) -> Response:
        parts = request.url.path.removeprefix("/api").split("/")
        name = "/".join(parts[2:4])
        if self.lost:
            return Response(status_code=503)
        mine = request.headers.get("authorization") == f"Bearer {TOKEN}"
        if self.closed.get(name) == "gated" and not mine:
            return _refused(403, "GatedRepo")
        if name not in self.commits or (name in self.closed and not mine):
            return _refused(401, "RepoNotFound")
        answer: Response = await further(request)
        return answer

    def _at(self, name: str, revision: str) -> str | None:
        commits = self.commits[name]
        return commits[-1] if revision == "main" else revision if revision in commits else None

    def _files(self, commit: str) -> dict[str, Path]:
        root = self._directory / commit
        return {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}

    def _info(self, owner: str, name: str, revision: str = "main") -> Response:
        commit = self._at(f"{owner}/{name}", revision)
        if commit is None:
            return _refused(404, "RevisionNotFound")
        siblings = [{"rfilename": path} for path in self._files(commit)]
        return JSONResponse({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})

    def _tree(self, owner: str, name: str, revision: str, path: str = "", recursive: bool = False) -> Response:
        commit = self._at(f"{owner}/{name}", revision)
        assert commit is not None
        below = f"{path}/" if path else ""
        found: dict[str, dict[str, Any]] = {}
        for file, place in self._files(commit).items():
            if not file.startswith(below):
                continue
            folders = file.removeprefix(below).split("/")[:-1]
            for depth in range(len(folders) if recursive else min(len(folders), 1)):
                folder = below + "/".join(folders[: depth + 1])
                found[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            if recursive or not folders:
                found[file] = _entry(file, place)
        return JSONResponse(list(found.values())) if found else _refused(404, "EntryNotFound")

    def _file(self, owner: str, name: str, revision: str, path: str) -> Response:
        commit = self._at(f"{owner}/{name}", revision)
        if commit is None:
            return _refused(404, "RevisionNotFound")
        headers = {"X-Repo-Commit": commit}
        file = self._files(commit).get(path)
        if file is None:
            return _refused(404, "EntryNotFound", headers)
        return FileResponse(file, headers=headers | {"ETag": f'"{_digest(file)}"'})


def _entry(path: str, file: Path) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": _digest(file), "size": file.stat().st_size}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _refused(status: int, code: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})
