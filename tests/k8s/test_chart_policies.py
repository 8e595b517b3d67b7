"""Rules that hold for every pod, service and policy of every value set."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from tests.k8s.helm import NAMES, Release, environment, matches, release

SERVES = {"gateway", "instance", "peer", "etcd"}  # containers that others send requests to
UNITS = {"": 1, "m": Decimal("0.001"), **{f"{u}i": 1024**n for n, u in enumerate("KMGT", 1)}}


@pytest.fixture(params=NAMES)
def r(request: pytest.FixtureRequest) -> Release:
    """Of one value set."""
    return release(request.param)


def quantity(text: str) -> Decimal:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", text).groups()  # type: ignore[union-attr]
    return Decimal(number) * UNITS[unit]


# Kubernetes' own list for namespaces with the label `pod-security.kubernetes.io/enforce: restricted`.
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
                      "secret"}  # fmt: skip


def test_a_namespace_that_restricts_its_pods_takes_them(r: Release) -> None:
    """And it gives them less than the namespace would."""
    for pod in r.pods():
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"sysctls", "windowsOptions", "seLinuxOptions", "appArmorProfile"} & context.keys()
        assert all((volume.keys() - {"name"}) <= RESTRICTED_VOLUMES for volume in pod.spec["volumes"]), pod.where
        assert pod.spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.spec.keys()
        for container in pod.containers():
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert not any(port.get("hostPort") for port in container.get("ports", []))
            for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
                probe = container.get(kind, {})
                assert not any("host" in probe.get(how, {}) for how in ("httpGet", "tcpSocket")), container["name"]


def test_containers_say_what_they_need(r: Release) -> None:
    for pod in r.pods():
        for container in pod.containers():
            needs = container["resources"]
            assert {"cpu", "memory"} <= needs["requests"].keys(), container["name"]
            assert "memory" in needs["limits"], container["name"]
            for name, limit in needs["limits"].items():
                asked = needs["requests"].get(name)
                assert asked is None or quantity(asked) <= quantity(limit)
                if "/" in name or name.startswith("hugepages-"):  # of these a request is all there may be
                    assert asked == limit


def test_a_container_that_serves_is_probed(r: Release) -> None:
    for pod in r.pods():
        for container in pod.containers():
            probes = {"startupProbe", "livenessProbe", "readinessProbe"} & container.keys()
            if container["name"] in SERVES - {"peer"}:
                assert len(probes) == 3, container["name"]
            elif container["name"] == "peer":  # not ready is no state of it: others read from it all the time
                assert probes == {"startupProbe", "livenessProbe"}
            elif container["name"] == "follower":  # ready with its leader
                assert probes == {"readinessProbe"}
            else:
                assert not probes, container["name"]
            for probe in probes:
                get = container[probe].get("httpGet")
                assert get is None or get["port"] in pod.ports()


def test_secrets_stand_in_files_or_secrets_alone(r: Release) -> None:
    for pod in r.pods():
        for container in pod.containers():
            texts = [*container.get("command", []), *container.get("args", []), *environment(container).values()]
            for text in texts:
                assert not re.search(r"://[^/]*:[^/]*@|(password|secret|key)=(?!/)", text, re.IGNORECASE), text
            for entry in container.get("env", []):
                if re.search("KEY|PASSWORD|TOKEN|SECRET", entry["name"]):
                    assert "secretKeyRef" in entry["valueFrom"], entry["name"]


def test_what_is_mounted_is_there_and_nothing_else(r: Release) -> None:
    for pod in r.pods():
        volumes = [v["name"] for v in pod.spec["volumes"]]
        assert len(set(volumes)) == len(volumes)
        mounted = {m["name"] for c in pod.containers() for m in c["volumeMounts"]}
        assert mounted - {"data"} == set(volumes)  # `data` is a claim of etcd's set
        for container in pod.containers():
            paths = [m["mountPath"] for m in container["volumeMounts"]]
            assert len(set(paths)) == len(paths)


def test_secrets_and_config_maps_that_the_chart_names_are_made_by_it(r: Release) -> None:
    made = {o["metadata"]["name"] for o in [*r.of("Secret"), *r.of("ConfigMap")]}
    made |= {o["spec"]["secretName"] for o in r.of("Certificate")}
    for pod in r.pods():
        named = pod.secrets() | {v["configMap"]["name"] for v in pod.spec["volumes"] if "configMap" in v}
        assert {n for n in named if n.startswith("hotswap-") and n not in GIVEN} <= made, pod.where


GIVEN = {"hotswap-cluster", "hotswap-front"}  # existing secrets of the value sets


def test_the_processes_of_a_pod_share_one_memory(r: Release) -> None:
    for pod in r.pods():
        if pod.labels.get("hotswap-peer") is None:
            continue
        shm = next(v["emptyDir"] for v in pod.spec["volumes"] if v["name"] == "shm")
        assert shm["medium"] == "Memory"
        for container in pod.containers():
            assert {m["mountPath"]: m["name"] for m in container["volumeMounts"]}["/dev/shm"] == "shm"
            assert environment(container)["HOTSWAP_ARENA"].startswith("/dev/shm/")
            assert "HOTSWAP_HOST" in environment(container)
        # A page is charged to the container that touches it first: slots that were fetched are the peer's memory.
        limit = pod.container("peer")["resources"]["limits"]["memory"]
        assert quantity(limit) > quantity(shm["sizeLimit"])
        assert pod.spec["initContainers"][0]["name"] == "peer"  # there before, and after, those who use its slots
        assert pod.spec["initContainers"][0]["restartPolicy"] == "Always"


def test_selectors_take_pods_and_ports_exist(r: Release) -> None:
    pods = list(r.pods())
    for service in r.of("Service"):
        chosen = [p for p in pods if matches({"matchLabels": service["spec"]["selector"]}, p.labels)]
        assert chosen, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert any(port["targetPort"] in {*p.ports(), *p.ports().values()} for p in chosen), port
    for o in [*r.of("Deployment"), *r.of("StatefulSet"), *r.of("PodDisruptionBudget")]:
        assert any(matches(o["spec"]["selector"], p.labels) for p in pods), o["metadata"]["name"]
    for pod in pods:
        for spread in pod.spec.get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"], pod.labels)
    for kind, part in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        for o in r.of(kind):
            chosen = [p for p in pods if matches(o["spec"]["selector"], p.labels)]
            assert chosen
            assert all(e["port"] in chosen[0].ports() for e in o["spec"][part])
            if kind == "ServiceMonitor":
                services = [s for s in r.of("Service") if matches(o["spec"]["selector"], s["metadata"]["labels"])]
                assert any(
                    e["port"] in {p["name"] for p in s["spec"]["ports"]} for s in services for e in o["spec"][part]
                )


def test_whoever_has_replicas_has_a_budget_and_is_spread(r: Release) -> None:
    for pod in r.pods():
        if pod.kind == "Job":
            continue
        budgets = [b for b in r.of("PodDisruptionBudget") if matches(b["spec"]["selector"], pod.labels)]
        assert [b["spec"]["maxUnavailable"] for b in budgets] == [1]
        keys = {c["topologyKey"] for c in pod.spec["topologySpreadConstraints"]}
        rules = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
        keys |= {t["topologyKey"] for t in rules.get("requiredDuringSchedulingIgnoredDuringExecution", [])}
        assert {"kubernetes.io/hostname", "topology.kubernetes.io/zone"} <= keys
