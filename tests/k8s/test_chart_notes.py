"""What an installation prints at its end can be done as it stands."""

from __future__ import annotations

import shlex

import pytest

from tests.k8s.helm import CHART, NAMESPACE, SETS, run


def command(name: str) -> list[str]:
    """What is to be run in a gateway's pod, with one of SETS."""
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
