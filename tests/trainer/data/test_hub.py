"""Data sets by their names on the hub, resolved and read by the hub's own libraries, over a hub of the tests' own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from msgspec.structs import replace

from tests.trainer.data.conftest import Open, prompts
from tests.trainer.data.hub_server import TOKEN, Hub
from tests.trainer.data.writing import problems, write
from tests.trainer.rollouts.generate_server import serve_app
from trainer.config import CheckpointConfig, EvalConfig, GatewayConfig, HubData, ModelConfig, SftConfig, TrainerConfig
from trainer.data import hub as names
from trainer.data.hub import at_commits
from trainer.errors import DataError

README = """---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: "data/train-*.jsonl"}
  - {split: test, path: data/test.jsonl}
- config_name: other
  data_files: other.json
---
"""


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


FILES: dict[str, str | bytes] = {
    "README.md": README,
    "data/train-0.jsonl": lines(problems(10)),
    "data/train-1.jsonl": lines(problems(10, 10)),
    "data/test.jsonl": lines(problems(4, 50)),
    "other.json": json.dumps(problems(3, 90), indent=1),
}


def offline(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    """As HF_HUB_OFFLINE, which the libraries read when they are imported."""
    for place in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", value)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub(tmp_path / "hub")
    with serve_app(served.app) as url:
        for place in ("huggingface_hub.constants.ENDPOINT", "datasets.config.HF_ENDPOINT"):
            monkeypatch.setattr(place, url)
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", f"{url}{template[template.index('/{repo_id}') :]}"
        )
        offline(monkeypatch, False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf" / "datasets"))
        monkeypatch.setattr("trainer.data.tokenise.DELAY_S", 0.01)
        names._builder.cache_clear()
        yield served


def test_a_name_with_its_splits(hub: Hub, open_data: Open) -> None:
    commit = hub.commit("us/sums", FILES)
    data = open_data("us/sums", "hub", eval_split="test")
    assert prompts(data) == [r["prompt"] for r in problems(20)]
    assert [r.prompt for r in data.held_out] == [r["prompt"] for r in problems(4, 50)]
    assert data.place(12) == f"hf://datasets/us/sums@{commit}/data/train-1.jsonl, line 3"
    other = open_data("us/sums", "hub", config="other", revision=commit)
    assert prompts(other) == [r["prompt"] for r in problems(3, 90)]
    assert other.place(2) == f"hf://datasets/us/sums@{commit}/other.json, record 3"


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.tsv", "train.parquet", "train.arrow", "train.tar"])
def test_files_of_each_kind_are_found_by_their_names(hub: Hub, open_data: Open, tmp_path: Path, name: str) -> None:
    hub.commit("us/sums", {f"data/{name}": write(Path(name).suffix[1:], tmp_path / name, problems(5)).read_bytes()})
    assert prompts(open_data("us/sums", "hub")) == [r["prompt"] for r in problems(5)]


@pytest.mark.parametrize(
    ("split", "places"),
    [
        ("train[:25%]", range(5)),
        ("train[5:8]", range(5, 8)),
        ("train[-2:]", range(18, 20)),
        ("train[90%:]", range(18, 20)),
    ],
)
def test_a_part_of_a_split(hub: Hub, open_data: Open, split: str, places: range) -> None:
    hub.commit("us/sums", FILES)
    part, whole = open_data("us/sums", "hub", split=split), open_data("us/sums", "hub")
    assert prompts(part) == [whole[i].prompt for i in places]
    assert [part.place(i) for i in range(len(part))] == [whole.place(i) for i in places]
    assert part.digest != whole.digest


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "absent": ({"path": "us/none"}, r"us/none .*[Cc]orrect the name; if it is private, set HF_TOKEN"),
    "private": ({"path": "us/private"}, r"us/private .*[Cc]orrect the name; if it is private, set HF_TOKEN"),
    "gated": ({"path": "us/gated"}, r"us/gated .*Ask for access on its page, and set HF_TOKEN"),
    "no such name": ({"path": "a/b/c"}, "Write owner/name, or an existing directory"),
    "no owner": ({"path": "sums"}, "sums .*no owner.* Write owner/name, or an existing directory"),
    "revision": ({"revision": "v9"}, r"us/sums .*Correct data\.revision"),
    "config": ({"config": "none"}, r"us/sums .*main.*other.*Correct data\.config"),
    "split": ({"split": "dev"}, r"us/sums has no split 'dev'\. Name one of these: train, test\."),
    "no files": ({"path": "us/empty"}, "us/empty .*page"),
    "kind": ({"path": "us/texts"}, "us/texts has text files, and these are read: json, csv"),
    "slice": ({"split": "train[x]"}, r"'train\[x\]' is no part of 20 records .*Write NAME"),
    "two": ({"split": "train[:1]+test[:1]"}, "is no part of 20 records .*of one split"),
    "row": (
        {"path": "us/rows"},
        r"hf://datasets/us/rows@\w{40}/train\.csv, row 2: it has no 'prompt', but",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_name_that_cannot_be_read_is_refused_with_the_remedy(hub: Hub, open_data: Open, case: str) -> None:
    for name in ("us/sums", "us/private", "us/gated"):
        hub.commit(name, FILES)
    hub.closed = {"us/private": "private", "us/gated": "gated"}
    hub.commit("us/empty", {"README.md": "# Nothing"})
    hub.commit("us/texts", {"train.txt": "1+1="})
    hub.commit("us/rows", {"train.csv": "prompt,target\n1+1=,2\n,3\n"})
    options, complaint = REFUSED[case]
    with pytest.raises(DataError, match=complaint):
        open_data(**{"path": "us/sums", "kind": "hub", **options})


def test_a_token_opens_what_is_private(hub: Hub, open_data: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("us/private", FILES)
    hub.closed = {"us/private": "private"}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(open_data("us/private", "hub")) == 20


def test_a_hub_that_cannot_be_reached(hub: Hub, open_data: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.lost = True
    with pytest.raises(DataError, match=r"us/sums .*HF_HUB_OFFLINE=1"):
        open_data("us/sums", "hub")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"us/sums .*the network and HF_ENDPOINT"):
        open_data("us/sums", "hub")


def test_a_run_shows_its_records_with_their_places(hub: Hub, tmp_path: Path, tiny_model: str) -> None:
    """In processes of its own, by the environment alone."""
    commit = hub.commit("us/sums", FILES)
    data = {"kind": "hub", "path": "us/sums", "workers": 2}
    config = {"model": {"path": tiny_model}, "data": data, "algorithm": {"name": "sft"}, "steps": 1, "metrics": "-"}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "trainer.main", "--config", str(tmp_path / "run.yaml"), "--show", "2"]
    about = {"HF_ENDPOINT": huggingface_hub.constants.ENDPOINT, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    shown = subprocess.run(command, env=os.environ | about, capture_output=True, text=True, check=False)
    place = rf"\(hf://datasets/us/sums@{commit}/data/train-\d\.jsonl, line \d+\)"
    assert len(re.findall(rf"^--- record \d+ {place}: \d+ tokens, \d+ learned$", shown.stdout, re.MULTILINE)) == 2, (
        shown.stderr
    )


def test_without_a_network_what_was_downloaded_is_read(
    hub: Hub, open_data: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = hub.commit("us/sums", FILES)
    huggingface_hub.snapshot_download("us/sums", repo_type="dataset")
    online = open_data("us/sums", "hub", eval_split="test")
    offline(monkeypatch, True)
    names._builder.cache_clear()
    data = open_data("us/sums", "hub", eval_split="test")
    assert (prompts(data), data.digest) == (prompts(online), online.digest)
    assert data.place(0) == f"{tmp_path}/hf/hub/datasets--us--sums/snapshots/{commit}/data/train-0.jsonl, line 1"
    with pytest.raises(DataError, match=r"us/none .*Run hf download --repo-type dataset .*HF_HUB_OFFLINE"):
        open_data("us/none", "hub")


def test_a_resumed_run_reads_the_commit_that_it_began_with(hub: Hub, tmp_path: Path) -> None:
    first, data = hub.commit("us/sums", FILES), HubData(path="us/sums")
    checkpoint, gateway = CheckpointConfig(path=str(tmp_path / "checkpoints")), GatewayConfig(url="http://127.0.0.1:9")
    model, sets = ModelConfig("m"), (EvalConfig(data=data),)
    config = TrainerConfig(model, data, SftConfig(), steps=1, checkpoint=checkpoint, gateway=gateway, eval=sets)

    def commits(config: TrainerConfig = config, keep: bool = True) -> set[str | None]:
        found = at_commits(config, keep=keep)
        return {each.revision for each in (found.data, found.eval[0].data) if isinstance(each, HubData)}

    assert commits(keep=False) == {first}
    assert not Path(checkpoint.path).exists()
    assert commits() == {first}
    second = hub.commit("us/sums", FILES | {"data/train-0.jsonl": ""})
    assert commits() == {first}
    assert commits(replace(config, data=replace(data, revision=second))) == {first, second}
    assert commits(replace(config, checkpoint=replace(checkpoint, resume="never"))) == {second}
    assert commits() == {second}
