"""Containers start processes with options that those processes take, and that agree with each other."""

from __future__ import annotations

import inspect
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

import trainer.config
import trainer.main
from server import etcd_roles
from server.cli.app import app
from server.gateway.__main__ import configured
from server.gateway.config import GatewayConfig
from server.gateway.main import SHUTDOWN_GRACE_S
from server.gateway.metrics import METRICS
from server.instance import main as instance_main
from server.instance.config import InstanceConfig
from server.instance.sidecar import TELL_S
from tests import monitoring
from tests.k8s.helm import NAMES, NAMESPACE, SETS, Object, Pod, arguments, environment, release, rendered, template
from weightsync.control.hosts import check_host
from weightsync.peer import __main__ as peer_main
from weightsync.store.etcd_url import EtcdUrl

COMMANDS: Any = typer.main.get_command(app)
KNOWN_TO_VLLM = {"--tensor-parallel-size", "--pipeline-parallel-size", "--max-model-len", "--nnodes", "--node-rank",
                 "--master-addr", "--master-port", "--distributed-executor-backend"}  # fmt: skip


@pytest.fixture(params=NAMES)
def pods(request: pytest.FixtureRequest) -> dict[str, Pod]:
    """Of one value set, by component; of two kinds of a component the first."""
    found: dict[str, Pod] = {}
    for pod in release(request.param).pods():
        found.setdefault(pod.labels["app.kubernetes.io/component"], pod)
    return found


def parsed(container: Object, monkeypatch: pytest.MonkeyPatch) -> click.Context:
    """A command of `hotswap` with the container's arguments and environment, as typer reads them."""
    as_in(container, monkeypatch)
    name, *options = arguments(container)
    return COMMANDS.get_command(None, name).make_context(name, options)  # type: ignore[no-any-return]


def as_in(container: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HOTSWAP_")]:
        monkeypatch.delenv(name)
    for name, value in environment(container).items():
        monkeypatch.setenv(name, value)


def gateway_config(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> GatewayConfig:
    container = pod.container("gateway")
    as_in(container, monkeypatch)
    command, *args = arguments(container)
    assert command == "gateway"
    return configured(args)


def instance_config(pod: Pod, monkeypatch: pytest.MonkeyPatch, container: str = "instance") -> InstanceConfig:
    context = parsed(pod.container(container), monkeypatch)
    made: list[InstanceConfig] = []
    monkeypatch.setattr(instance_main, "run_instance", made.append)
    with context:
        context.command.invoke(context)
    return made[0]


def test_the_gateway_takes_its_options(pods: dict[str, Pod], monkeypatch: pytest.MonkeyPatch) -> None:
    pod = pods["gateway"]
    config, ports = gateway_config(pod, monkeypatch), pod.ports()
    assert (config.host, config.port) == ("0.0.0.0", ports["http"])
    assert config.admin_port == 8002
    assert (config.admin_host != "127.0.0.1") == ("admin" in ports)
    assert config.require_key
    assert config.admin_key
    container = pod.container("gateway")
    https = config.ssl_certfile is not None
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert (container[probe]["httpGet"]["scheme"] == "HTTPS") == https
    assert pod.spec["terminationGracePeriodSeconds"] > config.leave_s + SHUTDOWN_GRACE_S
    ready = container["readinessProbe"]  # its service must have left it out before it closes its port
    assert config.leave_s > ready["periodSeconds"] * ready["failureThreshold"]


def test_the_gateway_lets_keys_name_checkpoints_on_volumes_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = json.dumps(["/checkpoints/grpo", "/checkpoints/a: b #1"])
    config = gateway_config(rendered("--set-json", f"gateway.checkpoints={own}").pod("gateway"), monkeypatch)
    assert config.checkpoints == ("/checkpoints/grpo", "/checkpoints/a: b #1")
    assert gateway_config(release("defaults").pod("gateway"), monkeypatch).checkpoints == ()
    assert template("--set-json", 'gateway.checkpoints=["relative"]').returncode != 0


def test_the_gateways_password_is_where_a_version_is_restored_and_in_no_process_that_stays() -> None:
    pod = release("colocated").pod("rollout")
    has = {c["name"] for c in pod.containers() if "etcd-auth-gateway" in {m["name"] for m in c["volumeMounts"]}}
    assert has == {"publish"}
    assert "restartPolicy" not in pod.container("publish")  # it ends before the instance starts


def test_the_instance_takes_its_options(pods: dict[str, Pod], monkeypatch: pytest.MonkeyPatch) -> None:
    pod = pods["rollout"]
    config = instance_config(pod, monkeypatch)
    gateway = gateway_config(pods["gateway"], monkeypatch)
    assert config.model == gateway.model
    assert config.cluster_tls is not None
    assert (config.cluster_tls, config.port) == (gateway.cluster_tls, pod.ports()["instance"])
    assert config.address(config.port) == "https://10.0.0.7:8001"
    assert {argument.partition("=")[0] for argument in config.vllm_args} <= KNOWN_TO_VLLM


def test_an_instance_has_time_to_drain(pods: dict[str, Pod], monkeypatch: pytest.MonkeyPatch) -> None:
    config = instance_config(pods["rollout"], monkeypatch)
    shutdown = re.search(r"timeout_graceful_shutdown=(\d+)", inspect.getsource(instance_main))
    assert shutdown is not None
    busy = config.drain_s + TELL_S + int(shutdown[1])
    assert pods["rollout"].spec["terminationGracePeriodSeconds"] >= 2 * busy  # the engine and the peer end after that


ROLES = {"gateway": "gateway", "instance": "instance", "follower": "instance", "peer": "peer", "publish": "trainer",
         "persist": "peer", "trainer": "trainer"}  # fmt: skip


def test_all_speak_to_one_store_each_as_the_user_it_is(pods: dict[str, Pod]) -> None:
    stores = set()
    for pod in pods.values():
        for container in (c for c in pod.containers() if c["name"] in ROLES):
            role, found = ROLES[container["name"]], environment(container)
            url = EtcdUrl.parse(found["HOTSWAP_STORE"])
            if container["name"] == "publish" and any(c["name"] == "persist" for c in pod.containers()):
                role = "gateway"  # it may make a version active that it has restored
            assert url.user == role
            assert role in etcd_roles.NAMES
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            for option in ("ca", "cert", "key", "password_file"):
                assert str(Path(url.options[option]).parent) in mounts, container["name"]
            assert found["HOTSWAP_CLUSTER_TLS"] in mounts
            (auth,) = [v for v in pod.spec["volumes"] if v["name"] == mounts["/etc/hotswap/etcd-auth"]]
            assert [item["path"] for item in auth["secret"]["items"]] == [Path(url.options["password_file"]).name]
            stores.add((url.endpoints, url.namespace))
    assert len(stores) == 1


def test_the_peer_takes_its_options(pods: dict[str, Pod], monkeypatch: pytest.MonkeyPatch) -> None:
    model = gateway_config(pods["gateway"], monkeypatch).model
    for pod in (p for p in pods.values() if p.labels.get("hotswap-peer")):
        container = pod.container("peer")
        as_in(container, monkeypatch)
        command, *options = arguments(container)
        assert command in COMMANDS.list_commands(None)
        settings = peer_main._settings(peer_main._parser().parse_args(options))
        address = f"10.0.0.7:{pod.ports()['peer']}"
        assert (settings.listen, settings.advertise, settings.model) == (address, address, model)
        assert settings.host == environment(container)["HOTSWAP_HOST"] == check_host(settings.host)
        assert settings.store == environment(container)["HOTSWAP_STORE"]
        assert str(settings.cluster_tls) == environment(container)["HOTSWAP_CLUSTER_TLS"]


def test_the_trainer_takes_its_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, component in (("colocated", "rollout"), ("kueue", "trainer")):
        r = release(name)
        container = r.pod(component).container("trainer")
        as_in(container, monkeypatch)
        *_, dash, module, option = arguments(container)
        assert (dash, module) == ("-m", trainer.main.__name__)
        path = Path(trainer.main._parser().parse_args([option]).config)
        assert str(path.parent) in [m["mountPath"] for m in container["volumeMounts"]]
        file = tmp_path / "config.yaml"
        file.write_text(next(o for o in r.of("ConfigMap") if "-trainer-" in o["metadata"]["name"])["data"][path.name])
        config = trainer.config.load(file)
        assert config.publish is not None
        assert config.publish.store_url == environment(container)["HOTSWAP_STORE"]
        assert config.gateway is not None
        mounts = [m["mountPath"] for m in container["volumeMounts"]]
        assert str(Path(config.gateway.api_key_file or "").parent) in mounts
        services = {s["metadata"]["name"]: s["spec"]["ports"][0]["port"] for s in r.of("Service")}
        assert config.gateway.url == "http://hotswap-gateway"
        assert services["hotswap-gateway"] == 80
        assert config.telemetry is not None
        assert config.telemetry.admin_url == f"https://hotswap-admin:{services['hotswap-admin']}"
        assert config.telemetry.cluster_tls in mounts
        assert config.checkpoint is not None
        assert config.checkpoint.path.startswith("/output/")
        grace = r.pod(component).spec["terminationGracePeriodSeconds"]
        assert grace > config.faults.grace_s


def test_the_pods_of_an_instance_take_the_same_options_but_for_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = list(release("leaderworkerset").pods())[-2:]
    leader, follower = (instance_config(p, monkeypatch, c) for p, c in zip(pods, ("instance", "follower"), strict=True))
    assert (leader.headless, follower.headless) == (False, True)
    ranks = [[a for a in config.vllm_args if a.startswith("--node-rank")] for config in (leader, follower)]
    assert ranks == [["--node-rank=0"], ["--node-rank=1"]]
    assert "--nnodes=2" in leader.vllm_args
    assert [a.replace("rank=1", "rank=0") for a in follower.vllm_args] == list(leader.vllm_args)
    assert "--headless" in follower.vllm_argv(cpu=False, port=1)
    same = {"headless": False, "vllm_args": (), "instance_id": ""}
    assert replace(follower, **same) == replace(leader, **same)


def test_the_autoscaler_looks_at_a_metric_of_the_gateway() -> None:
    (scaler,) = release("gpu-rdma").of("HorizontalPodAutoscaler")
    (metric,) = [m["pods"]["metric"]["name"] for m in scaler["spec"]["metrics"] if m["type"] == "Pods"]
    assert metric in {declared.name for declared in METRICS}
    target = release("gpu-rdma").get("Deployment", scaler["spec"]["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"]  # or every upgrade would take the number back


@pytest.mark.parametrize("name", ["colocated", "kueue"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_trainer_finds_the_gateway_of_its_own_release(name: str, scheme: str) -> None:
    """The release may have any name; an address of the user's stays."""
    values = ["--values", str(SETS[name]), f"--set=gateway.tls.mode={'none' if scheme == 'http' else 'certManager'}"]
    for r, url in (
        (rendered(*values, name="night"), f"{scheme}://night-hotswap-gateway"),
        (rendered(*values, "--set=trainer.config.gateway.url=http://mine", name="night"), "http://mine"),
    ):
        (data,) = (o["data"] for o in r.of("ConfigMap") if "-trainer-" in o["metadata"]["name"])
        config = yaml.safe_load(data["config.yaml"])
        assert config["gateway"]["url"] == url
        services = {s["metadata"]["name"] for s in r.of("Service")}
        for section in (config["telemetry"], config.get("memory", {}).get("serving", config["telemetry"])):
            host, port = section["admin_url"].removeprefix("https://").split(":")
            assert (host in services, port) == (True, "8002")
        assert "night-hotswap-gateway" in services


@pytest.mark.parametrize("name", ["gpu-rdma", "leaderworkerset"])
def test_instances_are_scaled_by_series_that_exist(name: str) -> None:
    """Those of dashboard and alerts, which other tests look for on the page of a real gateway."""
    scaling = {"enabled": "true", "prometheus": "http://prometheus:9090"}
    settings = (f"--set=rollout.autoscaling.{key}={value}" for key, value in scaling.items())
    r = rendered("--values", str(SETS[name]), *settings)
    (scaler,) = r.of("ScaledObject")
    known = {use.name for _, query in monitoring.queries() for use in monitoring.uses(monitoring.parsed(query))}
    found = [list(monitoring.uses(monitoring.parsed(t["metadata"]["query"]))) for t in scaler["spec"]["triggers"]]
    assert [[use.name for use in series] for series in found] == [
        ["hotswap_gateway_queue_depth"], ["hotswap_instance_kv_cache_usage"],
    ]  # fmt: skip
    for (use,) in found:
        assert use.name in known
        assert use.matched == (("namespace", "Equal", NAMESPACE),)
    target = scaler["spec"]["scaleTargetRef"]
    assert "replicas" not in r.get(target["kind"], target["name"])["spec"]


@pytest.mark.parametrize("drain", [0, 25, 600])
def test_a_pod_is_not_killed_before_its_answers_were_given_their_time(drain: int) -> None:
    pod = rendered("--values", str(SETS["minimal"]), f"--set=rollout.drain={drain}").pod("rollout")
    assert f"--drain={drain}" in arguments(pod.container("instance"))
    assert pod.spec["terminationGracePeriodSeconds"] >= drain + 60


def test_dashboard_and_alerts_are_installed_as_they_are() -> None:
    r = release("gpu-rdma")
    (rule,) = r.of("PrometheusRule")
    assert rule["spec"] == monitoring.RULES
    dashboard = r.get("ConfigMap", "hotswap-dashboard")
    assert dashboard["data"]["dashboard.json"] == (monitoring.MONITORING / "dashboard.json").read_text()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
