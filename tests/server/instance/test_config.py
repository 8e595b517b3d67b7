"""Where an instance listens, what its record says of it, and what it refuses."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli.app import app
from server.errors import CliError, ConfigError
from server.instance.config import InstanceConfig
from server.up.config import UpConfig

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
        (("--allowed-origins", '["*"]'), "proxy"),
        (("--max-model-len", "8", "--ssl-certfile", "x"), "hotswap gateway"),
        (("--served-model-name", "m"), "--name"),
        (("--allowed-orig", '["*"]'), "proxy"),  # vLLM takes the beginning of an option
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
