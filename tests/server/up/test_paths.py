"""A model by name: what the hub and its cache answer, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from server.errors import CliError
from server.up import served
from server.up.config import UpConfig
from server.up.paths import default_state_dir, resolve_model
from tests.server.asking import answering

MODEL = "owner/name"
OTHER_CACHE = r"set HF_HOME to the place of a cache that holds it, or name a checkpoint directory"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a hub that nothing answers for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def test_a_hub_that_is_out_of_reach_is_told_from_one_that_may_not_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = rf"'{MODEL}' .* not wholly in the cache {tmp_path / 'cache'}"
    with pytest.raises(CliError, match=rf"{cache}, .*127.0.0.1:9 .*refused.*: .*HF_ENDPOINT.*, {OTHER_CACHE}$"):
        resolve_model(MODEL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CliError, match=rf"{cache}, .*HF_HUB_OFFLINE.*: unset it, {OTHER_CACHE}$"):
        resolve_model(MODEL)


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, f"terms.*: accept them at URL/{MODEL}, and set HF_TOKEN"),
        (404, {"X-Error-Code": "RepoNotFound"}, "URL has no such model.*: check the name.*HF_TOKEN"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "refuses the token: .*HF_TOKEN"),
        (403, {}, "URL answers HTTP 403: "),
    ],
)
def test_what_the_hub_refuses_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str], said: str
) -> None:
    with answering(lambda *_: (status, b"{}"), headers=headers) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        with pytest.raises(CliError, match=rf"^'{MODEL}' is no directory.*{said.replace('URL', url)}") as refused:
            resolve_model(MODEL)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a model", "owner--name"])
def test_a_name_that_no_model_has_is_told_at_once(name: str) -> None:
    with pytest.raises(CliError, match="no name of a model: name a checkpoint directory, or a model as OWNER/NAME"):
        resolve_model(name)


def test_a_model_of_the_hub_is_served_under_its_name_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory in the cache is called by a commit. Its state is where commands look for servers."""
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(served, "resolve_model", lambda name: tmp_path / "snapshots" / "0123abcd")
    (found,) = served.served(UpConfig(MODEL))
    assert found.name == MODEL
    assert default_state_dir(MODEL).parent == tmp_path
