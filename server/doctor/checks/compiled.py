"""The gateway's request path in machine code: there, and made from the sources as they are now?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from server.doctor.finding import Finding, ok, warn
from server.doctor.registry import check
from server.doctor.world import World


@check("compiled-gateway", "the gateway's machine code, and a compiler to make it with")
def compiled_gateway(world: World) -> Iterator[Finding]:
    from server.gateway import compiled

    path = world.environ.get("PATH")
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name, path=path))), None)
    yield judge(compiled.built_from(), compiled.digest(), world.environ.get("HOTSWAP_PURE", "0"), compiler)


def judge(built_from: str, sources: str, pure: str, compiler: str | None) -> Finding:
    """The two digests, $HOTSWAP_PURE, and the C compiler's path."""
    if pure not in ("", "0"):
        return warn("HOTSWAP_PURE is set: the gateway runs from its sources, slower", "Unset HOTSWAP_PURE")
    if built_from == sources:
        return ok("compiled from the sources as they are")
    state = "older than its sources, which run instead, slower" if built_from else "not compiled: it runs slower"
    if compiler is None:
        return warn(f"{state}; no C compiler", "Install one (apt-get install gcc python3-dev), then `make setup`")
    return warn(state, f"`make setup` (it uses {compiler})")
