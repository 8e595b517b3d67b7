"""The README's Python runs, and its commands and files exist. Commands in docs/security.md make certificates that
members accept, and its tables say what the code does."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from server.cli.app import app
from server.etcd_roles import roles
from server.gateway.access.roles import table
from server.up.paths import ServerInfo
from tests.coordinating import coordinating
from tests.lacking import program
from tests.weightsync.test_tls import echo, shown
from weightsync import SlotReader
from weightsync.publish.publisher import Publisher
from weightsync.push import push
from weightsync.signing import Signer, Trust
from weightsync.tls import ClusterTls

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SECURITY = (ROOT / "docs" / "security.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference"),
    ROOT / "k8s" / "README.md",
]


@pytest.fixture
def served_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HOTSWAP_ARENA", str(tmp_path / "slots"))
    url = f"sqlite://{tmp_path}/store.db"
    with coordinating(url, "NAME"):
        yield url


def model_of_transformers(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # a second for these tests alone

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=tied, **sizes))


def train_one_step(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)


@pytest.mark.parametrize("tied", [True, False])
def test_the_publishing_loop_runs_as_printed(
    tied: bool,
    served_store: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = model_of_transformers(tied)
    model.save_pretrained(tmp_path / "checkpoint")
    push(tmp_path / "checkpoint", store=served_store, model="NAME")
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "state" / "NAME").mkdir(parents=True)
    ServerInfo("", "", "NAME", served_store, "", os.getpid()).write(tmp_path / "state" / "NAME")
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(tmp_path / "state"))
    exec(snippet, {"model": model, "train_one_step": train_one_step})
    assert capsys.readouterr().out.splitlines()[-1] == "step 2 now answers as version 4"
    with Publisher(served_store, model="NAME") as publisher:
        active, versions = publisher.active(), {v.version: v for v in publisher.versions()}
    assert active is not None
    assert (active.version, active.previous) == (4, 3)
    with SlotReader.open(Path(versions[4].slot), manifest_digest=versions[4].manifest_digest, version=4) as reader:
        assert ("lm_head.weight" in reader.manifest.tensors) is not tied
        found = torch.frombuffer(bytearray(reader.buffer("model.embed_tokens.weight")), dtype=torch.float32)
    assert torch.equal(found, model.model.embed_tokens.weight.detach().flatten())


def test_the_environment_of_hotswap_is_entered_before_it_is_asked_for() -> None:
    first = README.index("\nhotswap ")
    assert "\n. .venv/bin/activate" in README[:first]
    assert "\nVENV ?= .venv\n" in (ROOT / "Makefile").read_text()


def test_every_command_shown_exists() -> None:
    shown = {tuple(found.split()) for found in re.findall(r"`?hotswap ((?:weights )?[a-z]+)", README)}
    root = typer.main.get_command(app)
    assert len(shown) >= 5
    for words in shown:
        command = root
        for word in words:
            found = command.get_command(typer.Context(command), word)  # type: ignore[attr-defined]
            assert found is not None, words
            command = found
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_every_module_named_in_the_architecture_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    for name in set(re.findall(r"`([\w/]+\.py)`", text)):
        assert any(f"/{file}".endswith(f"/{name}") for file in files), name


# security


def test_the_openssl_commands(tmp_path: Path) -> None:
    program("openssl")
    commands = re.findall(r"^    ((?:openssl|printf) .*)$", SECURITY, re.MULTILINE)
    assert len(commands) == 6
    subprocess.run(["/bin/sh", "-ec", "\n".join(commands)], cwd=tmp_path, check=True, capture_output=True)
    assert Signer(tmp_path / "publisher.key").key_id in Trust([tmp_path / "publisher.pub"]).key_ids
    member = ClusterTls(tmp_path)

    async def meet() -> bytes:
        async with echo(member.server_context()) as port:
            return await shown(port, member.client_context())

    assert asyncio.run(meet())


def test_the_table_of_roles() -> None:
    rows = r"^\| `(gateway|instance|trainer|peer)` \| (.*) \|$"
    cells = dict(re.findall(rows, SECURITY.partition("## Roles")[2], re.MULTILINE))
    assert cells.keys() == {role.name for role in roles(["MODEL"])}
    for role in roles(["MODEL"]):
        assert _documented(cells[role.name]) == role.writes, role.name


def test_the_table_of_routes() -> None:
    assert table() in SECURITY, "run `make tables`"


def _documented(cell: str) -> set[str]:
    below, *rest = cell.split("; ") if cell.startswith("in `models/MODEL/`: ") else ("", cell)
    names = {"models/MODEL/" + name for name in re.findall(r"`([^`]+)`", below.partition(": ")[2])}
    return names.union(*(re.findall(r"`([^`]+)`", part) for part in rest))


def test_each_word_of_the_glossary_lives_in_one_type() -> None:
    words = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Words\n")[2]
    rows = re.findall(r"^\| ([a-z -]+) \| .+ \| `(\w+)` in `([\w/]+\.py)` \|$", words, re.MULTILINE)
    assert len(rows) >= 40
    assert len({word for word, _, _ in rows}) == len({name for _, name, _ in rows}) == len(rows)
    for _, name, file in rows:
        classes = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.ClassDef)]
        assert name in classes, f"{name} is not in {file}"
