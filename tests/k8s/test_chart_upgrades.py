"""Upgrades of the chart: which pods they change, and which they leave alone.

An API server answers what Helm asks while it renders: which kinds there are, and objects that a chart looks up.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.k8s.helm import CHART, NAMESPACE, SETS, Object, Release, release, rendered

VALUES = {"defaults": (), **{name: ("--values", str(path)) for name, path in SETS.items()}}
SCALED = (
    *("--set", "gateway.autoscaling.enabled=true,rollout.autoscaling.enabled=true"),
    *("--set", "rollout.autoscaling.prometheus=http://prometheus:9090"),
)
FIXED = ("--set", "gateway.autoscaling.enabled=false,gateway.replicas=5,rollout.replicas=4")
LWS = ("--values", str(SETS["leaderworkerset"]))


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


def replicas(r: Release) -> list[int | None]:
    tiers = [o for kind in ("Deployment", "StatefulSet", "LeaderWorkerSet") for o in r.of(kind)]
    return [o["spec"].get("replicas") for o in tiers if not o["metadata"]["name"].endswith("etcd")]


@pytest.mark.parametrize("values", [(), LWS], ids=["StatefulSet", "LeaderWorkerSet"])
def test_turning_autoscalers_on_keeps_the_number_of_pods(values: tuple[str, ...]) -> None:
    """The API takes a number that is left out for one, and would end all pods but one."""
    before, after = rendered(*values, *FIXED), rendered(*values, *SCALED)
    assert replicas(before) == [5, 4]
    with holding(before.objects, after.objects) as cluster:
        assert replicas(rendered(*values, *SCALED, *cluster)) == [5, 4]
        assert replicas(rendered(*values, *FIXED, "--set", "rollout.replicas=3", *cluster)) == [5, 3]


def test_an_upgrade_keeps_the_number_that_an_autoscaler_has_set() -> None:
    live = rendered(*SCALED)
    gateway, instances = live.get("Deployment", "hotswap-gateway"), live.get("StatefulSet", "hotswap-rollout")
    gateway["spec"]["replicas"], instances["spec"]["replicas"] = 7, 0
    with holding(live.objects, []) as cluster:
        assert replicas(rendered(*SCALED, *cluster)) == [7, 0]


def test_a_first_install_and_tools_without_a_cluster_leave_the_number_to_autoscalers() -> None:
    alone = rendered(*SCALED)
    assert replicas(alone) == [None, None]
    with holding([], alone.objects) as cluster:
        assert replicas(rendered(*SCALED, *cluster)) == [None, None]


def versioned(directory: Path, **versions: str) -> Path:
    """A copy of the chart with other versions."""
    shutil.copytree(CHART, directory)
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (directory / "Chart.yaml").write_text(yaml.safe_dump(about | versions))
    return directory


def users(r: Release) -> set[str]:
    return {job["metadata"]["name"] for job in r.of("Job") if "etcd-users" in job["metadata"]["name"]}


@pytest.mark.parametrize("name", VALUES)
def test_another_version_of_the_chart_restarts_nothing(name: str, tmp_path: Path) -> None:
    """Pods whose template changes are replaced, and a Job whose template changes is refused by the API."""
    old = release(name)
    new = rendered(*VALUES[name], chart=versioned(tmp_path / "hotswap", version="0.1.1"))
    assert new.objects[0]["metadata"]["labels"]["helm.sh/chart"] == "hotswap-0.1.1"
    assert list(new.pods()) == list(old.pods())
    assert users(new) == users(old)


def test_another_application_version_makes_users_anew(tmp_path: Path) -> None:
    """Its roles may be others, under the same image tag."""
    old, new = release("defaults"), rendered(chart=versioned(tmp_path / "hotswap", appVersion="0.2.0"))
    assert len(users(old) | users(new)) == 2
    assert [p for p in new.pods() if p.kind != "Job"] == [p for p in old.pods() if p.kind != "Job"]
