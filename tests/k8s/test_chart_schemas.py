"""Objects that the chart renders are such as Kubernetes takes, old and new: every field known, of the right type."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from tests.k8s.helm import CHART, NAMES, NAMESPACE, SETS, Object, release, run

OLDEST, NEWEST = "1.29", "1.37"
CLAIMS_SINCE = "1.34"  # what a value set with a claim for devices needs
INT = {"type": "integer"}
STRING, PORT = {"type": "string", "minLength": 1}, {"type": "string", "pattern": "^[a-z]+$"}
SECRET_KEY = {"type": "object", "required": ["name", "key"], "additionalProperties": False,
              "properties": {"name": STRING, "key": STRING}}  # fmt: skip


def closed(required: str, **properties: Any) -> Object:
    """An object with these fields and no others; `required`: some of them."""
    return {
        "type": "object",
        "required": required.split(),
        "additionalProperties": False,
        "properties": {k: v if isinstance(v, dict) else {} for k, v in properties.items()},
    }


TLS = closed(
    "ca serverName", serverName=STRING, keySecret=SECRET_KEY,
    ca=closed("secret", secret=SECRET_KEY), cert=closed("secret", secret=SECRET_KEY),
)  # fmt: skip
SCRAPE = {"type": "array", "minItems": 1,
          "items": closed("port path interval", port=PORT, path=STRING, interval=STRING, scheme={"enum": ["https"]},
                          tlsConfig=TLS)}  # fmt: skip
RULE = closed("alert expr labels annotations", alert=STRING, expr=STRING, labels=1, annotations=1, **{"for": STRING})
# Of kinds that Kubernetes does not define: the fields that are used, as their documentation has them.
CUSTOM: dict[str, Object] = {
    "Issuer": {"type": "object", "oneOf": [closed("selfSigned", selfSigned=1), closed("ca", ca=1)]},
    "Certificate": closed(
        "secretName issuerRef", secretName=STRING, duration=STRING, renewBefore=STRING, commonName=STRING,
        isCA={"type": "boolean"}, dnsNames={"type": "array", "minItems": 1}, ipAddresses={"type": "array"},
        usages={"type": "array", "items": {"enum": ["server auth", "client auth"]}},
        privateKey=closed("algorithm", algorithm={"enum": ["ECDSA"]}, size={"enum": [256]}, rotationPolicy=STRING),
        issuerRef=closed("name kind group", name=STRING, kind=STRING, group=STRING),
    ),
    "ServiceMonitor": closed("selector endpoints", selector=1, endpoints=SCRAPE),
    "PodMonitor": closed("selector podMetricsEndpoints", selector=1, podMetricsEndpoints=SCRAPE),
    "PrometheusRule": closed(
        "groups",
        groups={"type": "array", "minItems": 1, "items": closed("name rules", name=STRING,
                rules={"type": "array", "minItems": 1, "items": RULE})},
    ),
    "ScaledObject": closed(
        "scaleTargetRef triggers", minReplicaCount=INT, maxReplicaCount=INT,
        scaleTargetRef=closed("name", apiVersion=STRING, kind=STRING, name=STRING),
        advanced=closed("horizontalPodAutoscalerConfig", horizontalPodAutoscalerConfig=closed("behavior", behavior=1)),
        triggers={"type": "array", "minItems": 1, "items": closed("type metadata", type={"enum": ["prometheus"]},
            metadata=closed("serverAddress query threshold", serverAddress=STRING, query=STRING, threshold=STRING))},
    ),
    "LeaderWorkerSet": closed(
        "replicas leaderWorkerTemplate", replicas=INT, startupPolicy={"enum": ["LeaderCreated"]},
        rolloutStrategy=closed("type", type={"enum": ["RollingUpdate"]},
            rollingUpdateConfiguration=closed("", maxUnavailable=INT, maxSurge=INT, partition=INT)),
        leaderWorkerTemplate=closed("size leaderTemplate workerTemplate", size=INT, leaderTemplate=1,
            workerTemplate=1, restartPolicy={"enum": ["RecreateGroupOnPodRestart"]}),
    ),
}  # fmt: skip
GROUPS = {
    "Issuer": "cert-manager.io/v1", "Certificate": "cert-manager.io/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1", "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1", "ScaledObject": "keda.sh/v1alpha1",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """The package reads all definitions of a version anew for each object."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("schema_contents", "all_versions"):
            patched.setattr(kubernetes_validate.utils, name, functools.cache(getattr(kubernetes_validate.utils, name)))
        yield


@pytest.mark.parametrize("name", NAMES)
def test_objects_are_what_kubernetes_takes(name: str) -> None:
    r = release(name)
    for version in (CLAIMS_SINCE if r.of("ResourceClaimTemplate") else OLDEST, NEWEST):
        for o in r.objects:
            if o["kind"] not in CUSTOM:
                kubernetes_validate.validate(o, version, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_objects_of_other_groups_have_known_fields(name: str) -> None:
    for o in release(name).objects:
        if o["kind"] in CUSTOM:
            assert o["apiVersion"] == GROUPS[o["kind"]]
            jsonschema.validate(o["spec"], CUSTOM[o["kind"]])


def test_pods_of_a_leaderworkerset_are_what_kubernetes_takes() -> None:
    (group,) = release("leaderworkerset").of("LeaderWorkerSet")
    for role in ("leader", "worker"):
        template = group["spec"]["leaderWorkerTemplate"][f"{role}Template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role, **template["metadata"]}}
        kubernetes_validate.validate({**pod, "spec": template["spec"]}, NEWEST, strict=True)


def test_an_unknown_field_would_be_found() -> None:
    deployment = copy.deepcopy(release("minimal").of("Deployment")[0])
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolice"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)
    certificate = copy.deepcopy(release("minimal").of("Certificate")[0])
    certificate["spec"]["dnsName"] = ["hotswap"]
    with pytest.raises(jsonschema.ValidationError, match="dnsName"):
        jsonschema.validate(certificate["spec"], CUSTOM["Certificate"])


@pytest.mark.parametrize("name", NAMES)
def test_every_object_has_a_name_of_its_own_and_the_releases_namespace(name: str) -> None:
    objects = release(name).objects
    ids = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(set(ids)) == len(ids)
    assert {o["metadata"]["namespace"] for o in objects} == {NAMESPACE}
    assert all(len(o["metadata"]["name"]) <= 63 for o in objects)


@pytest.mark.parametrize("path", SETS.values(), ids=SETS)
def test_helm_finds_no_fault(path: Any) -> None:
    done = run("lint", "--strict", str(CHART), "--values", str(path))
    assert done.returncode == 0, done.stdout
