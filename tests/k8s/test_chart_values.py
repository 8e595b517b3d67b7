"""Values that cannot work are refused before anything reaches a cluster, in words that say what to change. With those
that do, what an installation prints at its end can be done as it stands. Upgrades change the pods that they must.

An API server answers what Helm asks while it renders: which kinds there are, and objects that a chart looks up.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import shlex
import shutil
import threading
from collections.abc import Collection, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.helm import (
    CHART,
    NAMES,
    NAMESPACE,
    ROOT,
    SETS,
    Object,
    Pod,
    Release,
    environment,
    release,
    rendered,
    run,
    template,
)

GPU = "nvidia.com/gpu"
README = ROOT / "k8s" / "README.md"
REFUSED = {
    "gateway.replica=3": "replica",
    "gateway.replicas=0": "/gateway/replicas",
    "gateway.leave=301": "/gateway/leave",
    "gateway.workers=many": "/gateway/workers",
    "gateway.extraArgs={sk-secret}": "/gateway/extraArgs/0",
    "etcd.members=2": "/etcd/members",
    "model.path=/elsewhere": "/model/path",
    "model.publish=always": "/model/publish",
    "rollout.kind=Deployment": "/rollout/kind",
    "rollout.sharedMemory=lots": "/rollout/sharedMemory",
    "rollout.hugepages.2Mi=1Gi": "2Mi",
    "peer.transport=udp": "/peer/transport",
    "trainer.run=Run 1": "/trainer/run",
    "clusterTls.mode=none": "/clusterTls/mode",
    "clusterTls.mode=existingSecret": "clusterTls.existingSecret",
    "gateway.tls.mode=existingSecret": "gateway.tls.existingSecret",
    "etcd.enabled=false": "externalStore.endpoints",
    "externalStore.endpoints={etcd}": "/externalStore/endpoints/0",
    "trainer.mode=job": "trainer.config",
    "rollout.autoscaling.enabled=true": "rollout.autoscaling.prometheus: name the server",
    "peer.resources.limits.cpu=1,peer.resources.limits.memory=null": "memory",
    "rollout.groupSize=2": "rollout.groupSize",
    "peer.dataPort=8003": "peer.dataPort: 8001",
    "gateway.autoscaling.minReplicas=9": "gateway.autoscaling: minReplicas is more",
    "rollout.autoscaling.maxReplicas=1": "rollout.autoscaling: minReplicas is more",
    "gateway.resources.requests.memory=2049Mi": "gateway.resources: the request for memory",
    "etcd.tls.existingSecret=members": "etcd.tls: name both secrets",
    "rollout.kind=LeaderWorkerSet,rollout.groupSize=2,rollout.rdma=1": "set it below rollout.rdma",
    f"fullnameOverride={'n' * 40},trainer.run=a-name-of-20-letters": "trainer.run: the Job's name",
    "trainer.mode=colocated,trainer.config.steps=1": "rollout.replicas to 1",
    "trainer.mode=colocated,trainer.config.steps=1,rollout.replicas=1,rollout.gpus=1": "rollout.deviceClass",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_bad_values_are_refused(settings: str) -> None:
    done = template("--set", settings)
    assert done.returncode != 0
    assert REFUSED[settings] in done.stderr.replace(".", "/") + done.stderr


def test_the_schema_knows_every_value_and_no_other() -> None:
    values: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    schema: Object = json.loads((CHART / "values.schema.json").read_text())
    assert sorted(paths_of(values, schema)) == sorted(paths_in(schema) - {("global",)})
    assert not list(optional(values, schema)), "a release that reuses the values of an older chart would lack them"


def paths_of(values: Object, schema: Object, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Of all values, down to where the schema lets anything in."""
    found = []
    for name, value in values.items():
        below = schema.get("properties", {}).get(name, {})
        found += paths_of(value, below, (*at, name)) if "properties" in below else [(*at, name)]
    return found


def optional(values: Object, schema: Object) -> Iterator[str]:
    """Values that have a default and may be missing all the same."""
    for name, value in values.items():
        if value is not None and name not in schema["required"]:
            yield name
        below = schema["properties"].get(name, {})
        if "properties" in below:
            yield from optional(value, below)


def paths_in(schema: Object, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for name, below in schema.get("properties", {}).items():
        found |= paths_in(below, (*at, name)) if "properties" in below else {(*at, name)}
    return found


def test_every_value_is_used() -> None:
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    schema: Object = json.loads((CHART / "values.schema.json").read_text())
    for path in paths_in(schema) - {("global",)}:
        assert re.search(rf"\.{path[-1]}\b", templates), ".".join(path)


def test_secrets_that_are_made_are_long_and_kept() -> None:
    made: list[dict[str, Any]] = [{s["metadata"]["name"]: s for s in rendered().of("Secret")} for _ in range(2)]
    assert made[0].keys() == {"hotswap-admin", "hotswap-etcd-auth"}
    for name, secret in made[0].items():
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert all(len(value) >= 56 for value in secret["data"].values())
        assert set(secret["data"].values()).isdisjoint(made[1][name]["data"].values())


def test_secrets_that_are_named_are_not_made() -> None:
    done = rendered("--set", "adminKey.existingSecret=mine,etcd.auth.existingSecret=ours")
    assert not done.of("Secret")
    named = set().union(*(pod.secrets() for pod in done.pods()))
    assert {"mine", "ours"} <= named
    assert not named & {"hotswap-admin", "hotswap-etcd-auth"}


def test_releases_beside_each_other_share_nothing() -> None:
    one, two = (rendered("--values", str(SETS["kueue"]), name=name) for name in ("one", "two"))
    names = [{(o["kind"], o["metadata"]["name"]) for o in r.objects} for r in (one, two)]
    assert names[0].isdisjoint(names[1])
    stores = [environment(r.pod("gateway").container("gateway"))["HOTSWAP_STORE"] for r in (one, two)]
    assert "one-hotswap-etcd-0" in stores[0]
    assert "two-hotswap-etcd-0" in stores[1]


def test_an_etcd_without_users_and_tls_is_reached_so() -> None:
    r = rendered("--set", "etcd.enabled=false,externalStore.endpoints={etcd:2379},externalStore.namespace=dev")
    gateway = r.pod("gateway")
    assert environment(gateway.container("gateway"))["HOTSWAP_STORE"] == "etcd://etcd:2379/dev"
    assert not any("etcd" in volume["name"] for volume in gateway.spec["volumes"])
    assert not [o for o in r.objects if o["metadata"]["name"].startswith("hotswap-etcd")]


def test_the_secrets_that_the_readme_names_take_the_place_of_cert_manager() -> None:
    step = README.read_text().partition("\n3. cert-manager, or ")[2].partition("\n4. ")[0]
    secrets = {name: name.replace(".", "-").lower() for name in re.findall(r"`(\S+Secret)`", step)}

    def with_secrets(names: Collection[str]) -> Release:
        settings = [f"{name}={secrets[name]}" for name in names] + re.findall(r"`(\S+=existingSecret)`", step)
        return rendered("--set", ",".join(settings))

    def issued(r: Release) -> list[Object]:
        return [o for o in r.objects if o["apiVersion"].startswith("cert-manager.io")]

    r = with_secrets(secrets)
    assert not issued(r)
    assert r.pod("etcd").secrets() == {"etcd-tls-existingsecret"}
    assert {"etcd-tls-clientsecret", "clustertls-existingsecret"} <= r.pod("gateway").secrets()
    assert issued(with_secrets([name for name in secrets if not name.startswith("etcd.")]))


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_of_the_users_takes_the_place_of_the_charts(name: str) -> None:
    """The API refuses a name that is there twice."""
    tiers = {"gateway": "gateway", "rollout": "instance", "peer": "peer", "trainer": "trainer"}
    containers = {c["name"]: c for pod in release(name).pods() for c in pod.containers()}
    own = {tier: [e["name"] for e in containers[c]["env"]] for tier, c in tiers.items() if c in containers}
    mine = {tier: json.dumps([{"name": n, "value": "mine"} for n in names]) for tier, names in own.items()}
    settings = [word for tier, text in mine.items() for word in ("--set-json", f"{tier}.extraEnv={text}")]
    checked = 0
    for pod in rendered(*VALUES[name], *settings).pods():
        for container in pod.containers():
            names = [e["name"] for e in container.get("env", [])]
            assert len(set(names)) == len(names), container["name"]
            if container["name"] in {tiers[tier] for tier in own}:
                assert {e.get("value") for e in container["env"]} == {"mine"}
                checked += 1
    assert checked >= len(own)


@pytest.mark.parametrize("name", NAMES)
def test_a_namespace_with_a_quota_for_cpus_can_be_lived_in(name: str) -> None:
    """Every container's limits can be set; a number is an amount, too."""
    owners = ("gateway", "rollout", "peer", "trainer", "etcd")
    limited = {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": 2, "memory": "700Gi"}}
    places = [f"{owner}.resources" for owner in (*owners, "persist")] + [
        "etcd.usersResources",
        "model.publishResources",
    ]
    settings = [word for place in places for word in ("--set-json", f"{place}={json.dumps(limited)}")]
    for pod in rendered(*VALUES[name], *settings).pods():
        for container in pod.containers():
            assert container["resources"]["limits"]["cpu"] == 2, container["name"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_says_how_much_disk_it_takes_and_takes_no_more(name: str) -> None:
    storage = "ephemeral-storage"
    for pod in release(name).pods():
        needs = [c["resources"] for c in pod.containers()]
        assert all(n["requests"][storage] and n["limits"][storage] for n in needs), pod.where
        for volume in (v for v in pod.spec["volumes"] if "emptyDir" in v and "huge" not in v["name"]):
            size = volume["emptyDir"]["sizeLimit"]
            assert size in [n["limits"][storage] for n in needs] or volume["name"] == "shm", pod.where
    unbounded = rendered(*VALUES[name], "--set", f"gateway.resources.limits.{storage}=null").pod("gateway")
    assert {"name": "tmp", "emptyDir": {}} in unbounded.spec["volumes"]


@pytest.mark.parametrize("name", ["gpu-rdma", "leaderworkerset"])
def test_the_memory_of_a_model_is_asked_for_where_it_may_be_filled(name: str) -> None:
    """The kubelet takes those first that have more than they asked for."""
    for pod in (p for p in release(name).pods() if p.labels.get("hotswap-peer")):
        for container in (c for c in pod.containers() if c["name"] in ("peer", "instance", "follower")):
            needs = container["resources"]
            assert needs["requests"]["memory"] == needs["limits"]["memory"], pod.where


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_that_asks_for_gpus_tolerates_their_taint(name: str) -> None:
    """Nodes with GPUs usually carry it, and not every cluster adds the toleration by itself."""
    asking = [
        pod
        for pod in release(name).pods()
        if pod.spec.get("resourceClaims") or any(GPU in c["resources"].get("limits", {}) for c in pod.containers())
    ]
    assert bool(asking) == (name not in ("defaults", "minimal"))
    for pod in asking:
        taint = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
        assert taint in pod.spec.get("tolerations", []), pod.where


@pytest.mark.parametrize("name", NAMES)
def test_the_containers_of_a_pod_share_its_rdma_devices(name: str) -> None:
    """They are counted for the pod: a host with as many as the values say can take it."""
    values = {"rollout": {"rdma": 0}, "trainer": {"rdma": 0}} | yaml.safe_load(
        SETS[name].read_text() if SETS.get(name) else "{}"
    )
    for pod in release(name).pods():
        component = pod.labels["app.kubernetes.io/component"]
        asked = [int(c["resources"].get("limits", {}).get("rdma/hca", 0)) for c in pod.containers()]
        assert sum(asked) == values.get(component, {}).get("rdma", 0), pod.where


@pytest.mark.parametrize("name", NAMES)
def test_volumes_and_containers_of_ones_own_are_in_the_pods_that_they_are_for(name: str) -> None:
    own = {"extraVolumes": {"name": "own", "emptyDir": {}}, "extraVolumeMounts": {"name": "own", "mountPath": "/own"}}
    init = {"extraInitContainers": {"name": "first", "image": "x"}}
    places = {"gateway": own | init, "rollout": own | init, "trainer": own}
    settings = [
        word
        for tier, lists in places.items()
        for value, one in lists.items()
        for word in ("--set-json", f"{tier}.{value}={json.dumps([one])}")
    ]
    more = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}}
    r = rendered(*VALUES[name], *settings, "--set-json", f"extraObjects={json.dumps([more])}")
    assert more in r.objects
    found = set()
    for pod in (p for p in r.pods() if "etcd" not in p.labels["app.kubernetes.io/component"]):
        component = pod.labels["app.kubernetes.io/component"]
        colocated = any(c["name"] == "trainer" for c in pod.spec["containers"]) and component == "rollout"
        assert [v["name"] for v in pod.spec["volumes"]].count("own") == (2 if colocated else 1)
        for container in pod.spec["containers"]:
            assert own["extraVolumeMounts"] in container["volumeMounts"]
            found.add(container["name"])
        assert (init["extraInitContainers"] in pod.spec.get("initContainers", [])) == (component != "trainer")
    assert {"gateway"} < found


def test_what_waits_for_an_instance_is_given_its_time_and_can_be_moved() -> None:
    r = rendered("--set", "rollout.startSeconds=1800")
    assert r.get("Deployment", "hotswap-gateway")["spec"]["progressDeadlineSeconds"] == 2400
    policy = "unhealthyPodEvictionPolicy"
    assert r.get("PodDisruptionBudget", "hotswap-gateway")["spec"][policy] == "AlwaysAllow"
    assert r.get("PodDisruptionBudget", "hotswap-rollout")["spec"][policy] == "IfHealthyBudget"
    drained = rendered("--set", "rollout.evictUnready=true")
    assert drained.get("PodDisruptionBudget", "hotswap-rollout")["spec"][policy] == "AlwaysAllow"


def test_upgrades_change_no_job_that_runs() -> None:
    """Jobs cannot be changed: with another image there must be another Job, or none at all."""
    old, new = (rendered("--set", f"image.tag={tag}") for tag in ("one", "two"))
    jobs = [{j["metadata"]["name"]: j["spec"] for j in r.of("Job")} for r in (old, new)]
    assert all(jobs[1][name] == jobs[0][name] for name in jobs[0].keys() & jobs[1].keys())
    assert not jobs[0].keys() & jobs[1].keys()


def command(name: str) -> list[str]:
    """The command of a gateway's pod, rendered with one of SETS."""
    values = ["--values", str(SETS[name]), "--namespace", NAMESPACE]
    done = run("install", "hotswap", str(CHART), "--dry-run=client", *values)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "hotswap keys create" in line]
    before, _, after = line.partition(" -- ")
    assert shlex.split(before)[-2:] == ["exec", "deployment/hotswap-gateway"]
    return shlex.split(after)


@pytest.mark.parametrize(
    ("name", "url", "authority"),
    [
        ("minimal", "http://127.0.0.1:8002", False),  # loopback, in the clear
        ("kueue", "https://127.0.0.1:8002", False),  # exposed: the pod's own certificate, as a member
        ("leaderworkerset", "https://localhost:8002", True),
        ("gpu-rdma", "https://localhost:8002", True),
    ],
)
def test_a_key_is_made_on_the_admin_port_as_it_is_set_up(name: str, url: str, authority: bool) -> None:
    words = command(name)
    assert (words[0] == "env") == authority
    assert words[-5:] == ["keys", "create", "NAME", "--url", url]
    assert ("HOTSWAP_ADMIN_CA=/etc/hotswap/gateway-tls/ca.crt" in words) == authority


# upgrades

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
        path = f"{_root(known['apiVersion'])}/namespaces/{NAMESPACE}/{plural}"
        there = pages.setdefault(
            path, {"kind": f"{known['kind']}List", "apiVersion": known["apiVersion"], "metadata": {}, "items": []}
        )
        if known in objects:
            pages[f"{path}/{known['metadata']['name']}"] = known
            there["items"].append(known)
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

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # Helm asks for all kinds at once, and a connection without a place waits for a second

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield "--dry-run=server", "--is-upgrade", "--disable-openapi-validation", "--kube-apiserver", url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stored(values: Object) -> Object:
    """Helm's record of a release of this chart in its first version, which had `values`."""
    about = {"apiVersion": "v2", "name": "hotswap", "version": "0.0.1"}
    info = {"status": "deployed", "first_deployed": "2026-01-01T00:00:00Z", "last_deployed": "2026-01-01T00:00:00Z"}
    release = {"name": "hotswap", "namespace": NAMESPACE, "version": 1, "info": info, "manifest": "", "config": {}}
    packed = base64.b64encode(
        gzip.compress(json.dumps(release | {"chart": {"metadata": about, "values": values}}).encode())
    )
    labels = {"owner": "helm", "name": "hotswap", "status": "deployed", "version": "1"}
    metadata = {"name": "sh.helm.release.v1.hotswap.v1", "namespace": NAMESPACE, "labels": labels}
    data = {"release": base64.b64encode(packed).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "helm.sh/release.v1", "data": data}


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


ETCD_STAYS = ("etcd.members=3", "etcd.storage.size=8192Mi", "etcd.resources.limits.memory=3Gi")
ETCD_ENDS = {
    "etcd.members=1": "etcd.members: hotswap-etcd has 3",
    "etcd.members=5": "etcd.members: hotswap-etcd has 3",
    "etcd.storage.size=9Gi": "etcd.storage: hotswap-etcd has 8Gi",
    "etcd.storage.className=fast": "etcd.storage: hotswap-etcd has 8Gi",
}


def test_an_upgrade_that_would_end_the_store_is_refused() -> None:
    live = release("defaults")
    with holding(live.objects, []) as cluster:
        for settings in ETCD_STAYS:
            assert rendered("--set", settings, *cluster).get("StatefulSet", "hotswap-etcd"), settings
        for settings, told in ETCD_ENDS.items():
            done = template("--set", settings, *cluster)
            assert done.returncode != 0, settings
            assert told in done.stderr


def test_a_release_keeps_its_name() -> None:
    """Another one is another etcd, with nothing in it."""
    live = release("defaults")
    beside = rendered(name="beside")
    with holding([*live.objects, *beside.objects], []) as cluster:
        assert rendered("--set", "fullnameOverride=hotswap", *cluster).get("StatefulSet", "hotswap-etcd")
        assert rendered(*cluster, name="third").get("StatefulSet", "third-hotswap-etcd")
        for settings in ("fullnameOverride=other", "fullnameOverride=other,etcd.members=1"):
            done = template("--set", settings, *cluster)
            assert done.returncode != 0
            assert "fullnameOverride: this release has hotswap-" in done.stderr
            assert "set fullnameOverride to hotswap" in done.stderr


OLDER = ("gateway.checkpoints", "rollout.autoscaling", "persist", "etcd.usersResources")


@pytest.mark.parametrize("lacking", OLDER)
def test_values_of_an_older_chart_are_refused_by_name_or_completed(lacking: str) -> None:
    """`--reuse-values` takes no default of the new chart."""
    values: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    *above, last = lacking.split(".")
    del (values[above[0]] if above else values)[last]
    upgrade = ["upgrade", "hotswap", str(CHART), "--namespace", NAMESPACE]
    with holding([stored(values)], release("defaults").objects) as (_, _, *cluster):
        reused = run(*upgrade, "--dry-run=server", *cluster, "--reuse-values")
        completed = run(*upgrade, "--dry-run=server", *cluster, "--reset-then-reuse-values")
    assert reused.returncode != 0
    assert f"missing property '{last}'" in reused.stderr
    assert completed.returncode == 0, completed.stderr


def test_a_trainer_that_runs_stays_as_it_is() -> None:
    """The API refuses a Job that was changed, after other objects have changed already."""
    live = rendered(*VALUES["kueue"])
    job = live.get("Job", "hotswap-train-grpo-1")
    job["spec"]["suspend"] = False  # Kueue has admitted it
    job["spec"]["template"]["spec"]["nodeSelector"] = {"flavor": "h100"}
    job["spec"]["template"]["metadata"]["labels"]["controller-uid"] = "7"
    changed = ("--set", "image.tag=two,trainer.config.steps=2000,trainer.gpus=4")
    with holding(live.objects, []) as cluster:
        new = rendered(*VALUES["kueue"], *changed, *cluster)
        another = rendered(*VALUES["kueue"], *changed, "--set", "trainer.run=grpo-2", *cluster)
    assert new.get("Job", "hotswap-train-grpo-1")["spec"] == job["spec"]
    assert new.pod("rollout").container("instance")["image"].endswith(":two")
    started = another.get("Job", "hotswap-train-grpo-2")["spec"]
    assert started["suspend"]
    assert started["template"]["spec"]["containers"][0]["image"].endswith(":two")


def maps(r: Release) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in [*r.of("ConfigMap"), *r.of("ResourceClaimTemplate")]}


def named_by(pod: Pod) -> set[str]:
    claims = {c["resourceClaimTemplateName"] for c in pod.spec.get("resourceClaims", [])}
    return claims | {v["configMap"]["name"] for v in pod.spec["volumes"] if "configMap" in v}


@pytest.mark.parametrize("name", VALUES)
def test_what_a_pod_reads_is_that_of_its_own_revision(name: str, tmp_path: Path) -> None:
    """A pod of the former revision that starts once more finds what it was made for, unchanged."""
    chart = versioned(tmp_path / "hotswap", version="0.1.1")
    with (chart / "files" / "probe.py").open("a") as file:
        file.write("# changed\n")
    more = {
        "colocated": ("--set", "rollout.gpus=2,trainer.config.steps=2000"),
        "kueue": ("--set", "trainer.config.steps=2000"),
    }
    old, new = release(name), rendered(*VALUES[name], *more.get(name, ()), chart=chart)
    for r in (old, new):
        for found in set().union(*map(named_by, r.pods())):
            assert maps(r)[found]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
            assert maps(r)[found].get("immutable", maps(r)[found]["kind"] == "ResourceClaimTemplate")
    for before, after in zip(old.pods(), new.pods(), strict=True):
        assert named_by(before).isdisjoint(named_by(after)), before.where
        assert len(named_by(before)) == len(named_by(after))


RESTARTS: dict[str, set[str]] = {
    "gateway.replicas=5,gateway.autoscaling.maxReplicas=9": set(),
    "rollout.replicas=5,rollout.partition=2,rollout.evictUnready=true": set(),
    "monitoring.operator=true,monitoring.interval=30s": set(),
    "networkPolicy.enabled=false": set(),
    "certManager.duration=4000h": set(),
    "gateway.service.type=NodePort": set(),
    "gateway.leave=20": {"gateway"},
    "gateway.resources.limits.memory=3Gi": {"gateway"},
    "rollout.drain=30": {"rollout"},
    "peer.resources.limits.memory=9Gi": {"rollout"},
    "model.publish=never": {"rollout"},
    "etcd.image.tag=v3.6.6": {"etcd"},
    "image.tag=two": {"gateway", "rollout", "etcd-users"},
}


@pytest.mark.parametrize("settings", RESTARTS)
def test_a_setting_restarts_the_pods_that_it_is_about(settings: str) -> None:
    old, new = list(release("defaults").pods()), list(rendered("--set", settings).pods())
    changed = [(a, b) for a, b in zip(old, new, strict=True) if a.spec != b.spec or a.labels != b.labels]
    assert {a.labels["app.kubernetes.io/component"] for a, _ in changed} == RESTARTS[settings]
