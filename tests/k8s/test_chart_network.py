"""Connections that the network policies allow; and over TLS: etcd takes its flags, and certificates hold the names
that their readers expect."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from tests import etcd
from tests.k8s.helm import NAMES, Object, Pod, arguments, environment, matches, release, rendered
from weightsync.store.etcd_url import EtcdUrl
from weightsync.tls import ClusterTls

PORTS = (8000, 8001, 8002, 8003, 8004, 2379, 2380)
BY_TCP = {"defaults", "minimal", "colocated"}


@pytest.mark.parametrize("name", NAMES)
def test_network_policies_let_through_what_is_meant_and_nothing_else(name: str) -> None:
    r = release(name)
    pods = {p.labels["app.kubernetes.io/component"]: p for p in r.pods()}
    assert all(len(policies(r.objects, pod)) >= 2 for pod in pods.values())  # to deny, and to allow
    lets = {(a, b, port) for a in pods for b in pods for port in PORTS if passes(r.objects, pods[a], pods[b], port)}
    fleet, peers = {"gateway", "rollout", "trainer"}, {"rollout", "trainer"}
    wanted = {(a, "gateway", 8000) for a in peers} | {("gateway", "rollout", 8001)}
    # Two ports are enough for TCP; RDMA's connections, and those of an instance over several pods, choose theirs.
    wanted |= {(a, b, port) for a in peers for b in peers for port in ((8003, 8004) if name in BY_TCP else PORTS)}
    wanted |= {(a, "etcd", 2379) for a in fleet | {"etcd-users"}} | {("etcd", "etcd", 2380)}
    admin = {(a, "gateway", 8002) for a in peers}
    wanted = {w for w in wanted if w[0] in pods and w[1] in pods}
    assert lets - admin == wanted
    exposed = "admin" in pods["gateway"].ports()
    who = "trainer" if "trainer" in pods else "rollout"
    assert lets & admin == ({(who, "gateway", 8002)} if exposed else set())


def policies(objects: list[Object], pod: Pod) -> list[Object]:
    found = [o["spec"] for o in objects if o["kind"] == "NetworkPolicy"]
    return [spec for spec in found if matches(spec["podSelector"], pod.labels)]


def passes(objects: list[Object], source: Pod, target: Pod, port: int) -> bool:
    """Whether a connection is let out of `source` and into `target`, by the policies of this release alone."""
    names = {name for name, number in target.ports().items() if number == port}
    ways = (("Egress", "egress", "to", source, target), ("Ingress", "ingress", "from", target, source))
    for way, rules, side, here, there in ways:
        ruling = [p for p in policies(objects, here) if way in p["policyTypes"]]
        allowed = any(
            (not rule.get("ports") or any(p["port"] in {port, *names} for p in rule["ports"]))
            and (not rule.get(side) or any(is_meant(peer, there) for peer in rule[side]))
            for policy in ruling
            for rule in policy.get(rules, [])
        )
        if ruling and not allowed:
            return False
    return True


def is_meant(peer: Object, pod: Pod) -> bool:
    """Whether a NetworkPolicy's peer is `pod`, which is in the release's own namespace."""
    return "podSelector" in peer and "namespaceSelector" not in peer and matches(peer["podSelector"], pod.labels)


@pytest.mark.parametrize("callers", ["[]", '[{"podSelector": {"matchLabels": {"app": "web"}}}]'], ids=["all", "some"])
def test_monitoring_from_nowhere_opens_no_port(callers: str) -> None:
    """An empty list of sources lets all of them in, so there must be no rule. The gateway alone may be open."""
    lists = ("--set-json", f"networkPolicy.monitoringFrom=[],networkPolicy.gatewayFrom={callers}")
    rules = [rule for o in rendered(*lists).of("NetworkPolicy") for rule in o["spec"].get("ingress", [])]
    assert len(rules) == 5
    assert [r["ports"] for r in rules if not r.get("from")] == ([[{"port": "http"}]] if callers == "[]" else [])


@pytest.mark.parametrize("name", NAMES)
def test_the_data_of_a_peer_comes_from_the_port_that_is_let_through(name: str) -> None:
    for pod in release(name).pods():
        if "hotswap-peer" in pod.labels:
            options = dict(a.split("=", 1) for a in pod.container("peer")["args"] if a.startswith("--"))
            assert options["--data-port"] == "8004"
            assert pod.ports()["peer-data"] == 8004
            assert (options["--transport"] == "tcp") == (name in BY_TCP)


def test_etcd_takes_its_flags_and_speaks_tls_alone() -> None:
    command, *given = arguments(release("defaults").pod("etcd").container("etcd"))
    assert command == "etcd"
    flags = {name.removeprefix("--"): value for name, _, value in (flag.partition("=") for flag in given)}
    said = subprocess.run([etcd.require(), "--help"], capture_output=True, text=True, check=False, timeout=60)
    known = set(re.findall(r"--([a-z-]+)", said.stdout + said.stderr))
    assert flags.keys() <= known
    assert {url.partition(":")[0] for name, url in flags.items() if "client-urls" in name or "peer-urls" in name} == {
        "https"
    }
    certificates = {c["metadata"]["name"]: c["spec"] for c in release("defaults").of("Certificate")}
    names = set(certificates["hotswap-etcd-tls"]["dnsNames"])
    members = [member.partition("=https://")[2].partition(":")[0] for member in flags["initial-cluster"].split(",")]
    assert len(members) == 3
    assert set(members) <= names
    store = environment(release("defaults").pod("gateway").container("gateway"))["HOTSWAP_STORE"]
    assert [host for host, _ in EtcdUrl.parse(store).endpoints] == members


def test_certificates_of_the_cluster_are_what_its_members_expect() -> None:
    r = release("leaderworkerset")
    made = {c["spec"]["secretName"]: c["spec"] for c in r.of("Certificate")}
    cluster, front = made["hotswap-cluster-tls"], made["hotswap-gateway-tls"]
    assert cluster["dnsNames"] == [ClusterTls.NAME]
    assert set(cluster["usages"]) == {"server auth", "client auth"}
    assert {"localhost", "hotswap-gateway", "hotswap-gateway.serving.svc", "llm.example.com"} <= set(front["dnsNames"])
    issuers = [spec["issuerRef"]["name"] for spec in (cluster, front, made["hotswap-etcd-tls"])]
    assert len(set(issuers)) == 3  # what signs the members' certificates signs nothing else
    monitor: dict[str, Any] = r.of("PodMonitor")[0]["spec"]["podMetricsEndpoints"][0]
    assert monitor["tlsConfig"]["serverName"] == ClusterTls.NAME
