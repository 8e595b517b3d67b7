"""Values that cannot work are refused before anything reaches a cluster, in words that say what to change; with those
that do, what an installation prints at its end can be done as it stands."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml

from tests.k8s.helm import CHART, NAMESPACE, SETS, Object, environment, rendered, run, template

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


def paths_of(values: Object, schema: Object, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Of all values, down to where the schema lets anything in."""
    found = []
    for name, value in values.items():
        below = schema.get("properties", {}).get(name, {})
        found += paths_of(value, below, (*at, name)) if "properties" in below else [(*at, name)]
    return found


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
