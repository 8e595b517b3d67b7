"""The options of an instance, the environment of its vLLM, and its warm-up before it serves."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli.app import app
from server.errors import CliError, ConfigError
from server.instance import main
from server.instance.config import InstanceConfig
from server.instance.kernels import SAMPLER_ENV, flashinfer_samples
from server.instance.main import prepare_environment, warm_up
from server.instance.middleware import Admission
from server.up.config import UpConfig
from tests.lacking import program
from tests.server.instance.asgi import head, part
from weightsync.vllm_engine.gpus import Gpus

# options

TLS = Path("/etc/hotswap/tls")


def config(**fields: Any) -> InstanceConfig:
    return InstanceConfig(Path("/model"), "m", "sqlite:///unused.db", "i", **fields)


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({}, "http://127.0.0.1:1"),
        ({"host": "127.0.0.2"}, "http://127.0.0.2:1"),
        ({"host": "::1"}, "http://[::1]:1"),
        ({"cluster_tls": TLS}, "https://127.0.0.1:1"),
        ({"host": "10.0.0.7", "cluster_tls": TLS}, "https://10.0.0.7:1"),
        ({"host": "0.0.0.0", "advertise": "10.0.0.7", "cluster_tls": TLS}, "https://10.0.0.7:1"),
        ({"host": "::", "advertise": "fd00::7", "cluster_tls": TLS}, "https://[fd00::7]:1"),
        ({"host": "0.0.0.0", "advertise": "pod-0.pods", "cluster_tls": TLS}, "https://pod-0.pods:1"),
    ],
)
def test_the_address_that_gateways_are_told(fields: dict[str, Any], address: str) -> None:
    assert config(**fields).address(1) == address


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"host": "0.0.0.0"}, "give --cluster-tls DIR"),
        ({"host": "10.0.0.7"}, "give --cluster-tls DIR"),
        ({"host": "example.org"}, "give --cluster-tls DIR"),
        ({"host": "0.0.0.0", "cluster_tls": TLS}, "--advertise ADDRESS"),
        ({"host": "::", "advertise": "::", "cluster_tls": TLS}, "--advertise ADDRESS"),
        ({"kv_cache_gib": 0.0}, "--kv-cache-gib 0: must be more than 0"),
    ],
)
def test_what_it_refuses(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**fields)


@pytest.mark.parametrize(
    ("cpu", "gib", "args", "nbytes"),
    [
        (True, None, (), 1 << 30),
        (False, None, (), None),
        (True, 0.5, (), 1 << 29),
        (False, 2.5, (), 5 << 29),  # where instances share a GPU
        (False, 2.5, ("--kv-cache-memory-bytes=7",), 7),
        (True, None, ("--kv-cache-memory-bytes", "7"), 7),
    ],
)
def test_the_kv_cache_has_the_size_that_was_asked_for(
    cpu: bool, gib: float | None, args: tuple[str, ...], nbytes: int | None
) -> None:
    argv = [
        word for arg in config(kv_cache_gib=gib, vllm_args=args).vllm_argv(cpu=cpu, port=1) for word in arg.split("=")
    ]
    told = [int(value) for name, value in itertools.pairwise(argv) if name == "--kv-cache-memory-bytes"]
    assert told[-1:] == ([nbytes] if nbytes is not None else [])


@pytest.mark.parametrize("own", [(), ("--scheduling-policy", "fcfs")])
def test_the_scheduler_goes_by_priority_unless_it_is_told_otherwise(own: tuple[str, ...]) -> None:
    argv = config(vllm_args=own).vllm_argv(cpu=True, port=1)
    last = len(argv) - argv[::-1].index("--scheduling-policy")  # argparse takes the last one
    assert argv[last] == (own[1] if own else "priority")


def test_whether_it_spans_hosts() -> None:
    assert not config(vllm_args=("--tensor-parallel-size", "2")).spans_hosts
    assert config(vllm_args=("--nnodes=2", "--node-rank", "1")).spans_hosts


def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    command = ["instance", "--model", str(tmp_path), "--name", "m", "--store", f"sqlite://{tmp_path}/s.db"]
    refused = CliRunner().invoke(app, [*command, "--host", "0.0.0.0"])
    assert "--cluster-tls" in str(refused.exception)
    refused = CliRunner().invoke(app, [*command, "--cluster-tls", str(tmp_path)])
    assert "there is no tls.crt" in str(refused.exception)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--api-key", "secret"), "--api-key-file"),
        (("--api_key=secret",), "hotswap keys create"),
        (("--allowed-origins", '["*"]'), "--allow-origin"),
        (("--max-model-len", "8", "--ssl-certfile", "x"), "hotswap gateway"),
        (("--served-model-name", "m"), "--name"),
        (("--allowed-orig", '["*"]'), "--allow-origin"),  # vLLM takes the beginning of an option
        (("--root-path", "/x"), "proxy"),
        (("--middleware=a.b",), "proxy"),
    ],
)
def test_options_that_are_the_gateways_affair_are_refused_by_name(given: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        config(vllm_args=given)
    assert "secret" not in str(refused.value)
    with pytest.raises(CliError, match=says):
        UpConfig(model="m", vllm_args=given)
    assert config(vllm_args=("--max-model-len", "8", "-O3", "--", "-tp=2")).vllm_args


@pytest.mark.broad
@pytest.mark.engine
def test_vllms_own_parser_says_what_it_does_not_know(tmp_path: Path) -> None:
    """Before any engine starts, in one line; and what is refused here by name is still an option of vLLM's."""
    program = """
import sys
from server.errors import ConfigError
from server.instance import config
known = {name for action in config.vllm_parser()._actions for name in action.option_strings}
assert set(config._INSTEAD) - {"--model-tag"} <= known, set(config._INSTEAD) - known
for given in (["--max-modell-len", "8"], ["--max-model-len", "x y"]):
    try:
        config.vllm_parser().parse_args(given)
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    unknown, bad = done.stdout.strip().splitlines()
    assert unknown == "vLLM: unrecognized arguments: --max-modell-len; did you mean --max-model-len?"
    assert "--max-model-len" in bad


# the environment


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build for CUDA with FlashInfer, whose programs and packages are those in this directory alone."""
    for name in ("CUDA_PATH", "FLASHINFER_NVCC", SAMPLER_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(main, "for_cpus", lambda: False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flashinfer").mkdir()
    executable(tmp_path / "ninja")
    compiler = program("gcc")
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(compiler).parent}")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return tmp_path


def executable(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def toolkit(home: Path, libraries: str = "lib64") -> None:
    """With a compiler for CUDA that does nothing, and real libraries that are empty."""
    executable(home / "bin" / "nvcc")
    (home / "include").mkdir()
    (home / "include" / "curand.h").touch()
    (home / libraries).mkdir(parents=True)
    for name in ("cudart", "cuda"):
        empty = ["-shared", "-x", "c", os.devnull, "-o", str(home / libraries / f"lib{name}.so")]
        subprocess.run([program("gcc"), *empty], check=True)


def test_a_toolkit_that_compiles_and_links_is_enough(gpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    toolkit(gpus / "cuda")
    prepare_environment()
    assert SAMPLER_ENV not in os.environ
    assert not caplog.text


def test_the_toolkit_of_the_nvcc_on_the_path(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME")
    toolkit(gpus / "other")
    monkeypatch.setenv("PATH", f"{gpus / 'other' / 'bin'}:{os.environ['PATH']}")
    assert flashinfer_samples(os.environ)


@pytest.mark.parametrize(
    "lacks", ["all of it", "FlashInfer", "headers", "the libraries where they are looked for", "the compiler", "ninja"]
)
def test_without_a_toolkit_that_works_vllm_samples(
    gpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    """A request with top_p would end the engine: FlashInfer compiles its kernel for it, or fails to."""
    if lacks != "all of it":  # the wheels of CUDA have lib/libcudart.so.13, and no lib64
        toolkit(gpus / "cuda", "lib" if "libraries" in lacks else "lib64")
    if lacks == "FlashInfer":
        (gpus / "flashinfer").rmdir()
    if lacks == "headers":  # a toolkit that has been installed in part, as some packages do
        (gpus / "cuda" / "include" / "curand.h").unlink()
    if lacks == "the compiler":
        monkeypatch.setenv("CXX", str(gpus / "c++"))
    if lacks == "ninja":
        monkeypatch.setenv("PATH", str(gpus / "cuda"))
    prepare_environment()
    assert os.environ[SAMPLER_ENV] == "0"
    assert "flashinfer-jit-cache" in caplog.text


@pytest.mark.parametrize(("package", "samples"), [("flashinfer_jit_cache", True), ("flashinfer_cubin", False)])
def test_what_is_compiled_ahead_needs_no_toolkit(gpus: Path, package: str, samples: bool) -> None:
    """The other package has kernels of attention and of products, and not this one."""
    (gpus / package).mkdir()
    prepare_environment()
    assert (SAMPLER_ENV not in os.environ) == samples


@pytest.mark.parametrize("said", ["0", "1"])
def test_what_the_user_says_of_the_sampler_counts(
    gpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    monkeypatch.setenv(SAMPLER_ENV, said)
    prepare_environment()
    assert os.environ[SAMPLER_ENV] == said
    assert not caplog.text


FOR_CPUS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "MALLOC_ARENA_MAX": "1"}


@pytest.mark.parametrize("cpus", [True, False])
def test_a_build_has_the_settings_of_its_device(gpus: Path, monkeypatch: pytest.MonkeyPatch, cpus: bool) -> None:
    """On a GPU the threads of an engine would share one heap, and each start would warn of the random state."""
    monkeypatch.setattr(main, "for_cpus", lambda: cpus)
    for name in FOR_CPUS:
        monkeypatch.delenv(name, raising=False)
    prepare_environment()
    assert {name: os.environ.get(name) for name in FOR_CPUS} == (FOR_CPUS if cpus else dict.fromkeys(FOR_CPUS))
    assert (SAMPLER_ENV in os.environ) is not cpus


@pytest.mark.usefixtures("gpus")
def test_without_a_gpu_nothing_is_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says after twenty seconds that it could not infer a device type."""
    monkeypatch.setattr(main.gpus, "look", lambda: Gpus((), why_none="NVML: Driver Not Loaded"))
    monkeypatch.setattr(main, "prepare_environment", lambda: pytest.fail("it goes on"))
    with pytest.raises(ConfigError, match=r"no GPU is seen here \(NVML: Driver Not Loaded\)"):
        main.run_instance(InstanceConfig(tmp_path, "toy", "sqlite:///nowhere"))


@pytest.mark.usefixtures("gpus")
async def test_the_warm_up_samples_as_clients_do() -> None:
    """Code that samples by temperature, top_p, top_k, a seed, penalties or a grammar is compiled, or fails, before the
    instance serves."""
    asked: list[tuple[str, dict[str, Any]]] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        asked.append((scope["path"], json.loads((await receive())["body"])))
        await send(head(b"application/json"))
        await send(part(b"{}", more=False))

    await warm_up(Admission(engine), "toy")
    assert {path for path, _ in asked} == {"/v1/completions", "/v1/chat/completions"}
    kinds: list[set[str]] = [{"temperature", "top_p", "top_k"}, {"seed", "repetition_penalty"}, {"structured_outputs"}]
    assert [kind for kind in kinds if not any(kind <= body.keys() for _, body in asked)] == []
    assert all(body["model"] == "toy" for _, body in asked)
