"""Upgrades of the chart: which pods they change, and which they leave alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.k8s.api_server import holding
from tests.k8s.helm import CHART, SETS, Release, release, rendered

VALUES = {"defaults": (), **{name: ("--values", str(path)) for name, path in SETS.items()}}
SCALED = (
    *("--set", "gateway.autoscaling.enabled=true,rollout.autoscaling.enabled=true"),
    *("--set", "rollout.autoscaling.prometheus=http://prometheus:9090"),
)
FIXED = ("--set", "gateway.autoscaling.enabled=false,gateway.replicas=5,rollout.replicas=4")
LWS = ("--values", str(SETS["leaderworkerset"]))


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
