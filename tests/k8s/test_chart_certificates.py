"""Etcd takes its flags, and certificates are what those who look at them expect."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from tests import etcd
from tests.k8s.helm import arguments, environment, release
from weightsync.store.etcd_url import EtcdUrl
from weightsync.tls import ClusterTls


def etcd_flags() -> dict[str, str]:
    command, *flags = arguments(release("defaults").pod("etcd").container("etcd"))
    assert command == "etcd"
    return {name.removeprefix("--"): value for name, _, value in (flag.partition("=") for flag in flags)}


def test_etcd_takes_its_flags_and_speaks_tls_alone() -> None:
    flags = etcd_flags()
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
