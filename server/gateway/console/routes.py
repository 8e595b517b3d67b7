"""`GET /console` and the files of the page. No key is asked for: a browser sends none, and they hold no data."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from server.errors import NotFound
from server.gateway.console import files

router = APIRouter(tags=["console"])
PREFIX = "/console"

FileName = Annotated[str, Path(description="one of the page's own files")]
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {t.partition(";")[0]: {} for t in files.TYPES.values()}},
    304: {"description": "The client has it already (`If-None-Match`)"},
}


@router.get(PREFIX, response_class=Response, responses=_ANSWERS)
async def console(request: Request) -> Response:
    """The page: on the admin port the whole console, on the public port its chat."""
    return _answer(request, "")


@router.get(PREFIX + "/{name}", response_class=Response, responses={**_ANSWERS, 404: {"description": "No such file"}})
async def console_file(request: Request, name: FileName) -> Response:
    """A script, style sheet or picture of the page."""
    return _answer(request, name)


router.get(PREFIX + "/", include_in_schema=False)(console)
router.head(PREFIX, include_in_schema=False)(console)
router.head(PREFIX + "/{name}", include_in_schema=False)(console_file)


def _answer(request: Request, name: str) -> Response:
    file = files.find(name, public=not request.state.admin_port)
    if file is None:
        raise NotFound(f"There is no public route {request.method} {request.url.path}.")
    headers = {**files.HEADERS, "etag": file.etag}
    if file.unchanged(request.headers.get("if-none-match")):
        return Response(status_code=304, headers=headers)
    headers |= {"content-type": file.media_type, "content-length": str(len(file.body))}
    return Response(b"" if request.method == "HEAD" else file.body, headers=headers)


def is_open(path: str) -> bool:
    """Whether `path` is the console's, and so asked for without a key."""
    return path == PREFIX or path.startswith(PREFIX + "/")
