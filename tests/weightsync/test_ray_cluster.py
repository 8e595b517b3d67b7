"""Data that leave this process for nodes of a Ray cluster."""

from __future__ import annotations

import pytest

from tests.weightsync.codes import refused
from weightsync.ray_cluster import connect, parse_bundle, passed_on


def test_no_secret_is_passed_on_but_where_it_lies() -> None:
    env = {
        "VLLM_API_KEY": "s", "VLLM_LOGGING_LEVEL": "INFO", "HF_TOKEN": "s", "HF_HOME": "/h", "PATH": "/bin",
        "TOKENIZERS_PARALLELISM": "0", "HOTSWAP_ETCD_PASSWORD_FILE": "/p", "HOTSWAP_ADMIN_KEY": "s",
        "HOTSWAP_HOST": "a",
    }  # fmt: skip
    found = passed_on(env, ("VLLM_", "HF_", "TOKENIZERS_", "HOTSWAP_"), ("HOTSWAP_HOST",))
    assert found.keys() == {"VLLM_LOGGING_LEVEL", "HF_HOME", "TOKENIZERS_PARALLELISM", "HOTSWAP_ETCD_PASSWORD_FILE"}


def test_a_bundle_is_resources_by_name() -> None:
    assert parse_bundle("CPU=8, GPU=2,rack=0.5") == {"CPU": 8.0, "GPU": 2.0, "rack": 0.5}


@pytest.mark.parametrize("text", ["", "CPU", "CPU=", "=1", "CPU=x", "CPU=0", "CPU=-1", "CPU=nan"])
def test_what_is_no_bundle_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"AMOUNT|float"):
        parse_bundle(text)


def test_the_server_of_a_ray_client_is_refused() -> None:
    with refused("ray_unavailable", "on a node of the cluster"):
        connect("ray://head:10001")
