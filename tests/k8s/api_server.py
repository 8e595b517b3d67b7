"""An API server, as far as Helm asks one while it renders: which kinds there are, and objects that a chart looks up."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.k8s.helm import NAMESPACE, Object


@contextlib.contextmanager
def holding(objects: list[Object], kinds: list[Object]) -> Iterator[tuple[str, ...]]:
    """Options with which Helm renders an upgrade of what a server has: `objects`. It knows their kinds, and `kinds`."""
    pages: dict[str, Object] = {"/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}}
    versions: dict[str, dict[str, Object]] = {}
    for known in [*objects, *kinds]:
        name = known["kind"].lower()
        plural = f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
        resource = {"name": plural, "kind": known["kind"], "namespaced": True, "verbs": ["get"]}
        versions.setdefault(known["apiVersion"], {})[plural] = resource
        if known in objects:
            path = f"{_root(known['apiVersion'])}/namespaces/{NAMESPACE}/{plural}/{known['metadata']['name']}"
            pages[path] = known
    for version, resources in versions.items():
        listed = {"kind": "APIResourceList", "groupVersion": version, "resources": list(resources.values())}
        pages[_root(version)] = listed
    groups = [{"name": v.partition("/")[0], "versions": [_version(v)]} for v in versions if v != "v1"]
    pages["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    pages["/apis"] = {"kind": "APIGroupList", "groups": groups}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = pages.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield "--dry-run=server", "--is-upgrade", "--disable-openapi-validation", "--kube-apiserver", url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _root(version: str) -> str:
    return f"/api/{version}" if version == "v1" else f"/apis/{version}"


def _version(version: str) -> Object:
    return {"groupVersion": version, "version": version.partition("/")[2]}
