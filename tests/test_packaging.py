"""Images and manifests name things that exist, and start processes with options those processes accept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import weightsync.push
from server.cli.app import app
from server.gateway.__main__ import config_from, parser

ROOT = Path(__file__).parent.parent
BASE = ROOT / "k8s" / "base"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((BASE / "deployment.yaml").read_text())["spec"]["template"]["spec"]
    return spec


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in [*pod["initContainers"], *pod["containers"]]}


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_the_kustomization_lists_every_manifest() -> None:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(p.name for p in BASE.glob("*.yaml") if p.name != "kustomization.yaml")


def test_the_gateway_starts_with_its_manifest_options(pod: dict[str, Any]) -> None:
    command, *args = containers(pod)["gateway"]["args"]
    assert command == "gateway"
    config = config_from(parser().parse_args(args))
    port = containers(pod)["gateway"]["ports"][0]
    assert (config.host, config.port, port["name"]) == ("0.0.0.0", port["containerPort"], "http")
    assert config.admin_host == "127.0.0.1"  # not for the service to reach
    assert config.admin_port not in (None, *(p["containerPort"] for p in containers(pod)["gateway"]["ports"]))
    assert f"--port={config.admin_port}" not in containers(pod)["instance"]["args"]
    assert f" {config.admin_port}:{config.admin_port}" in (BASE.parent / "README.md").read_text()


def test_the_instance_and_the_publication_use_the_gateways_store_and_model(pod: dict[str, Any]) -> None:
    found = containers(pod)
    gateway = config_from(parser().parse_args(found["gateway"]["args"][1:]))
    push = weightsync.push._parser().parse_args(found["publish"]["args"])
    name, *args = found["instance"]["args"]
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    instance = command.make_context(name, list(args)).params
    assert {push.store, gateway.store, instance["store"]} == {gateway.store}
    assert {push.model, gateway.model, instance["name"]} == {gateway.model}
    assert push.directory == instance["model"]
    assert instance["host"] == "127.0.0.1"  # not for others to reach
    assert f"127.0.0.1:{instance['port']}/health" in str(found["instance"]["livenessProbe"])


def test_the_pod_shares_one_arena_and_may_do_little(pod: dict[str, Any]) -> None:
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in containers(pod).values():
        mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
        assert mounts["/dev/shm"]["name"] == "shm"
        assert mounts["/models"]["readOnly"] is True
        assert environment(container)["HOTSWAP_ARENA"].startswith("/dev/shm/")
        limits = container["securityContext"]
        assert limits["readOnlyRootFilesystem"] is True
        assert limits["allowPrivilegeEscalation"] is False
        assert limits["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


def test_the_gateway_runs_before_anything_is_published(pod: dict[str, Any]) -> None:
    first, second = pod["initContainers"]
    assert (first["name"], first["restartPolicy"]) == ("gateway", "Always")
    assert "startupProbe" in first
    assert second["name"] == "publish"
    assert "restartPolicy" not in second


def test_the_service_reaches_the_gateway(pod: dict[str, Any]) -> None:
    service = yaml.safe_load((BASE / "service.yaml").read_text())
    assert service["spec"]["ports"][0]["targetPort"] == containers(pod)["gateway"]["ports"][0]["name"]


def stages() -> dict[str, str]:
    """Dockerfile text by stage."""
    parts = re.split(r"^FROM \S+ AS (\S+)\n", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_both_images_run_hotswap_without_privileges(target: str) -> None:
    stage = stages()[target]
    assert re.search(r"^USER 10001:10001$", stage, re.MULTILINE)
    assert 'ENTRYPOINT ["hotswap"]' in stage
    assert f"--from=build-{target} " in stage


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_is_built_from_files_that_are_there_and_not_ignored(target: str) -> None:
    copied = [s for line in re.findall(r"^COPY (?!--from)(.+)$", stages()[f"build-{target}"], re.MULTILINE)
              for s in line.split()[:-1]]  # fmt: skip
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert f"requirements/{target}.txt" in copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in kept, source
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= set(copied)
