"""Bubblewrap and user namespaces: what a trainer needs to run code that a model wrote."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from server.doctor.finding import Finding, ok, warn
from server.doctor.registry import check
from server.doctor.world import World

INSTALL = "`make setup`, or apt-get install bubblewrap; needed only for rewards that run a model's code"
SWITCHES = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap",
    ),
}


@check("sandbox", "bubblewrap and user namespaces, for rewards that run code")
def sandbox(world: World) -> Iterator[Finding]:
    path = world.environ.get("PATH", os.defpath)
    found = shutil.which("bwrap", path=path) or shutil.which("bwrap", path=str(Path(sys.executable).parent))
    yield judge(world, found, as_root=os.geteuid() == 0)


def judge(world: World, bubblewrap: str | None, *, as_root: bool) -> Finding:
    """A trial says more than the switches; they say what to mend. Root needs no user namespace."""
    if bubblewrap is None:
        return warn("no bubblewrap (`bwrap`)", INSTALL)
    user = [] if as_root else ["--unshare-user"]
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    trial = world.run([bubblewrap, *user, *apart, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"])
    if trial.status == 0:
        return ok(f"{bubblewrap} isolates programs" + ("" if as_root else ", without root"))
    off = [mend for path, (bad, mend) in SWITCHES.items() if not as_root and world.read(path) == bad]
    in_container = "In a container, allow namespaces (a seccomp profile that lets unshare and mount pass)"
    return warn(f"{bubblewrap} cannot isolate: {trial.said}", "; ".join(off) or in_container)
