"""The request path in machine code: MODULES, compiled by mypyc from the very sources that lie here.

`make setup` (part of the set-up; `python -m server.gateway.compiled`) makes them. A gateway uses them if they were
made from what the sources say now; after an edit, without a compiler, or with HOTSWAP_PURE=1 Python runs the sources,
which is the same and slower. So an edit takes effect at once, and `make setup` makes it fast again.

They keep to rules of mypyc: no slotted or generic dataclasses (its classes have no `__dict__` anyway), and msgspec
structures in modules of their own; and no slice of bytes between two bounds whose first may lie behind the second, for
which mypyc 2.4 raises SystemError (hence wire/bodies.py is not among them).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("hotswap.gateway")

MODULES = (
    "admission", "connection", "exchange", "routes",
    "access.costs", "access.keys", "access.limits",
    "fleet.affinity", "fleet.instance", "fleet.retries", "fleet.routing", "fleet.view",
    "models.served",
    "observe.stats",
    "queue.gate",
    "wire.capture", "wire.head", "wire.journal", "wire.pool", "wire.relay",
)  # fmt: skip
SHARED = ("prefixes",)  # of `server` itself; instances run the sources
GROUP = "hotswap_gateway"
_HERE = Path(__file__).parent
_BUILT = _HERE / "_compiled"
_DIGEST = _BUILT / "DIGEST"


def sources() -> list[Path]:
    """The files that are compiled."""
    own = [_HERE / f"{name.replace('.', '/')}.py" for name in MODULES]
    return [*own, *(_HERE.parent / f"{name}.py" for name in SHARED)]


def digest() -> str:
    """Of the sources and of this Python: what a build is good for."""
    found = hashlib.sha256(f"{sys.implementation.cache_tag} {MODULES} {SHARED}".encode())
    for source in sources():
        found.update(source.read_bytes())
    return found.hexdigest()


def built_from() -> str:
    """The digest of what was compiled last; empty if nothing was."""
    return _DIGEST.read_text() if _DIGEST.exists() else ""


def search_path(package: str, path: Iterable[str]) -> list[str]:
    """Where the modules of `package`, one of this gateway's, are looked for: first among the compiled, if any fit."""
    return [str(_BUILT / package.rpartition(".")[2]), *path] if in_use else list(path)


def build() -> None:
    """Compiles, in about a minute of one core. Raises ImportError without mypyc, SystemExit if the compiler fails."""
    from mypyc.build import mypycify
    from setuptools import setup  # type: ignore[import-untyped]

    root = _HERE.parent.parent
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        fresh = digest()
        config = ["--config-file", str(root / "pyproject.toml")] if (root / "pyproject.toml").exists() else []
        os.chdir(root)
        paths = [str(s.relative_to(root)) for s in sources()]
        extensions = mypycify([*config, *paths], opt_level="3", group_name=GROUP, target_dir=str(work / "c"))
        command = ["-q", "build_ext", "--build-lib", str(work / "lib"), "--build-temp", str(work / "obj")]
        setup(name=GROUP, packages=[], py_modules=[], ext_modules=extensions, script_args=command)
        _install(work / "lib", fresh)


def _install(lib: Path, fresh: str) -> None:
    """Replaces the last build: the digest goes first and comes last, so half a build is never used."""
    shutil.rmtree(_BUILT, ignore_errors=True)
    shutil.copytree(lib / "server" / "gateway", _BUILT)
    for library in lib.glob("*.so"):
        shutil.copy2(library, _BUILT)
    for name in SHARED:
        for module in (lib / "server").glob(f"{name}.*"):
            (_BUILT / "shared").mkdir(exist_ok=True)
            shutil.copy2(module, _BUILT / "shared")
    _DIGEST.write_text(fresh)


def _fits() -> bool:
    built = built_from()
    if os.environ.get("HOTSWAP_PURE", "0") not in ("", "0") or not built:
        return False
    if built == digest():
        return True
    log.warning("the compiled gateway is older than its sources, which run instead: `make setup` renews it")
    return False


in_use = __name__ != "__main__" and _fits()
if in_use:
    sys.path.append(str(_BUILT))  # the group's own library
    sys.modules["server.gateway"].__path__.insert(0, str(_BUILT))  # for the modules that are in no package below it
    sys.modules["server"].__path__.insert(0, str(_BUILT / "shared"))


if __name__ == "__main__":
    build()
