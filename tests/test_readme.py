"""What the README says works: its Python runs, its commands and files exist."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer

from server.cli.app import app
from weightsync import Coordinator, SlotReader, ensure_arena, open_store
from weightsync.publish.publisher import Publisher

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "k8s" / "README.md"]


@pytest.fixture
def served_store(tmp_path: Path) -> Iterator[str]:
    """A store whose swaps are coordinated, as in a gateway; nobody serves, so every commit is immediate."""
    url = f"sqlite://{tmp_path}/store.db"
    stopping = threading.Event()

    async def coordinate() -> None:
        store = open_store(url)
        await ensure_arena(store, tmp_path / "slots")
        coordinator = Coordinator(store, "NAME")
        coordinator.start()
        ready.set()
        await asyncio.to_thread(stopping.wait)
        await coordinator.stop()
        await store.close()

    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(coordinate()), daemon=True)
    thread.start()
    assert ready.wait(20)
    yield url
    stopping.set()
    thread.join()


class Model:
    """What the snippet takes for granted: something with a state_dict."""

    def __init__(self) -> None:
        self.weight = np.zeros((4, 4), np.float32)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"lm_head.weight": self.weight}


def train_one_step(model: Model) -> None:
    model.weight = model.weight + 1


def test_the_publishing_loop_runs_as_printed(served_store: str, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (url,) = re.findall(r'"(sqlite:.*?)"', snippet)
    exec(snippet.replace(url, served_store), {"model": Model(), "train_one_step": train_one_step})
    assert capsys.readouterr().out.splitlines()[-1] == "step 2 now answers as version 3"
    with Publisher(served_store, model="NAME") as publisher:
        active, versions = publisher.active(), {v.version: v for v in publisher.versions()}
    assert active is not None
    assert (active.version, active.previous) == (3, 2)
    with SlotReader.open(Path(versions[3].slot), manifest_digest=versions[3].manifest_digest, version=3) as reader:
        assert np.frombuffer(reader.buffer("lm_head.weight"), np.float32).tolist() == [3.0] * 16


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
