"""docs/guide: every block of a page runs, in the page's order, against the server that tests share.

A block of `sh` or `python` behind the comment `<!-- not run: REASON -->` is checked instead: its commands and their
options exist, and so do the names that it imports. NOT_RUN counts them. A block of `text` behind a block shows lines
of its output: numbers stand for any number there, and `...` for anything.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import typer
import yaml
from click import Command, Context
from huggingface_hub.errors import GatedRepoError

from server.cli.app import app
from server.errors import ServerError
from server.gateway.fleet import routing
from server.gateway.fleet.view import Fleet
from server.gpus import devices_of_each, visible_devices
from server.missing import NO_VISION
from server.up import paths
from server.up.paths import ServerInfo
from tests.lacking import program
from tests.live import LiveServer
from tests.packages import unpacked
from tests.server.gateway.fleet.test_routing import Seen
from weightsync import Publisher
from weightsync.adapters.trl import CLIENT
from weightsync.errors import WeightSyncError, arena_full, unsupported_vllm
from weightsync.vllm_engine.gpus import Gpus
from weightsync.vllm_engine.releases import VLLM_VERSIONS

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
NOT_RUN = {
    "your-own-loop": 1,
    "from-vllm-serve": 3,
    "when-it-does-not-work": 0,
    "trl-verl-openrlhf": 3,
    "one-box-with-gpus": 4,
    "your-first-change": 3,
}
BLOCK = re.compile(
    r"^(?:<!-- not run: (.+?) -->\n)?```(\w*)\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
SHIM = '#!/bin/sh\nexec {python} -m server.cli "$@"\n'
VLLM = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
OPTIONS_OF_VLLM = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")


class Block(NamedTuple):
    reason: str  # why it is not run
    language: str
    code: str
    output: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page of docs/guide that are in `sh` or `python`."""
    found = BLOCK.findall((GUIDE / f"{page}.md").read_text())
    return [block for block in map(Block._make, found) if block.language in ("sh", "python")]


class Reader:
    """A reader in a directory with the checkpoints `model` and `tuned`, beside a running server of the model demo."""

    def __init__(self, live: LiveServer, variables: dict[str, str]) -> None:
        self._live, self._variables = live, variables
        self.names: dict[str, Any] = {"__name__": "guide"}  # of the Python blocks, and what the reader has of them

    def follows(self, block: Block) -> None:
        expected = re.sub(r"\bdemo\b", self._live.name, block.output)
        code = block.code.replace("127.0.0.1:8000", self._live.url.removeprefix("http://"))
        code = code.replace("127.0.0.1:8001", self._live.processes.admin_url.removeprefix("http://"))
        code = re.sub(r"\bdemo\b", self._live.name, code)
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, "docs/guide", "exec", dont_inherit=True), self.names)
            shows(expected, printed.getvalue())
        else:
            shows(expected, self.run(code))

    def run(self, code: str) -> str:
        """The output of a shell, stderr last."""
        command = ["bash", "-eu", "-o", "pipefail", "-c", code]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | self._variables, timeout=240)
        assert ran.returncode == 0, f"{code}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout + ran.stderr


def shows(expected: str, printed: str) -> None:
    """Whether each line that a page shows was printed."""
    for line in expected.splitlines():
        parts = (r"[\d.]+".join(map(re.escape, re.split(r"\d[\d.]*", part))) for part in line.split("..."))
        assert re.search(".*".join(parts), printed), f"not printed: {line}\n{printed}"


@pytest.fixture
def reader(
    live: LiveServer, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    live.push(checkpoints["a"])
    (tmp_path / "model").symlink_to(checkpoints["a"])
    (tmp_path / "tuned").symlink_to(checkpoints["b"])
    state, of = tmp_path / "state" / live.name, live.processes
    state.mkdir(parents=True)
    ServerInfo(live.url, of.admin_url, live.name, of.store, str(of.admin_key_file), os.getpid()).write(state)
    shim = tmp_path / "bin" / "hotswap"
    shim.parent.mkdir()
    asks = shim.with_name("curl")  # an answer that is an error ends the page
    asks.write_text(f'#!/bin/sh\nexec {program("curl")} --fail-with-body "$@"\n')
    asks.chmod(0o755)
    shim.write_text(SHIM.format(python=sys.executable))
    shim.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(state.parent))
    monkeypatch.setenv("HOTSWAP_ADMIN_KEY", of.admin_key)
    path = {"PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    yield Reader(live, path | {"COLUMNS": "200"})
    live.push(checkpoints["a"])


@pytest.mark.engine
@pytest.mark.parametrize("page", list(NOT_RUN))
def test_a_reader_follows_the_page(page: str, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "trl-verl-openrlhf":
        reader.names |= for_trl(monkeypatch)
    if page == "your-first-change":
        reader.names |= vars(routing) | {"Seen": Seen, "Counter": Counter, "routing": routing}
    for block in blocks(page):
        if not block.reason:
            reader.follows(block)
    if page == "your-first-change":
        monkeypatch.setattr(routing, "POLICIES", reader.names["POLICIES"])
        reader.names["test_two_choices_avoid_the_busiest_and_spread_over_the_others"]()


def for_trl(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Has TRL's trainers take two steps on a CPU; the data and the reward of the reader."""
    import trl
    from datasets import Dataset

    client = importlib.import_module(CLIENT)
    for module in [m for name, m in sys.modules.items() if name.startswith("trl.") and "VLLMClient" in vars(m)]:
        patch.setattr(module, "VLLMClient", client.VLLMClient)  # `use` replaces it
    here: dict[str, Any] = {
        "output_dir": "out", "max_steps": 2, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False,
        "per_device_train_batch_size": 4, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    patch.setattr(trl, "GRPOConfig", functools.partial(trl.GRPOConfig, **here, num_generations=4))
    patch.setattr(trl, "SFTConfig", functools.partial(trl.SFTConfig, **here))
    prompts, texts = (Dataset.from_dict({key: ["3+4=", "1+1="] * 4}) for key in ("prompt", "text"))

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[0] % 7) for ids in completion_ids]

    return {"prompts": prompts, "texts": texts, "reward": reward}


def test_the_settings_of_verl_exist() -> None:
    (code,) = [
        code
        for _, language, code, _ in BLOCK.findall((GUIDE / "trl-verl-openrlhf.md").read_text())
        if language == "yaml"
    ]
    theirs = unpacked("verl", "0.9.1") / "verl" / "trainer" / "config"
    known = yaml.safe_load((theirs / "_generated_ppo_trainer.yaml").read_text())

    def exist(wanted: dict[str, Any], known: dict[str, Any]) -> None:
        for key, value in wanted.items():
            assert key in known, key
            if isinstance(value, dict):
                exist(value, known[key])

    exist(yaml.safe_load(code), known)
    assert "hf_model" in (theirs / "actor" / "actor.yaml").read_text()


@pytest.mark.parametrize("page", list(NOT_RUN))
def test_the_blocks_that_are_not_run(page: str) -> None:
    left_out = [block for block in blocks(page) if block.reason]
    assert len(left_out) == NOT_RUN[page]
    for block in left_out:
        if block.language == "python":
            check_imports(block.code)
        else:
            for line in block.code.replace("\\\n", " ").splitlines():
                check_command(shlex.split(line, comments=True))


def test_every_page_is_here_and_leads_on() -> None:
    assert {path.stem for path in GUIDE.glob("*.md")} == set(NOT_RUN)
    for page in NOT_RUN:
        text = (GUIDE / f"{page}.md").read_text()
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert len(text.split()) >= 400, page
        assert len(prose.split()) <= 900, page
        assert text.rpartition("\n## ")[2].startswith("Read next\n"), page


@pytest.mark.engine
def test_what_a_reader_is_told_when_it_does_not_work(reader: Reader, live: LiveServer) -> None:
    """Each text below a heading is what the code says there."""
    page = (GUIDE / "when-it-does-not-work.md").read_text()
    shown = dict(re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    said = {**told_of_a_start(), **told_to_clients(live), **told_to_publishers(live, Path("model"))}
    port = f"--port {live.processes.config.port}"
    started = reader.run(f"hotswap up model {port} 2>&1 || true")
    said["The port is taken"] = started.replace(port.split()[1], "8000")
    assert said.keys() == shown.keys()
    for heading, expected in shown.items():
        shows(expected, re.sub(rf"'{live.name}'", "'demo'", said[heading]))


def told_of_a_start() -> dict[str, str]:
    """By heading, of what keeps a server from starting."""
    name, asked = "meta-llama/Llama-3.2-1B", httpx.Request("GET", "https://huggingface.co")
    gated = GatedRepoError("", response=httpx.Response(403, request=asked))
    unseen = raised(lambda: visible_devices({}, Gpus((), why_none="NVML: Driver Not Loaded")))
    few = raised(lambda: devices_of_each([2, 2], {"CUDA_VISIBLE_DEVICES": "0,1"}, None))
    return {
        "The hub gives the model to some alone": paths._not_fetched(name, gated),
        "Another release of vLLM": str(unsupported_vllm("0.34.0", VLLM_VERSIONS)),
        "torchvision of another torch": NO_VISION,
        "No GPU, or too few": f"{unseen}\n{few}",
        "Shared memory is full": str(arena_full("/dev/shm", 16_060_522_496, 64 << 20)),
    }


def told_to_clients(live: LiveServer) -> dict[str, str]:
    """By heading, of answers with an error."""
    stranger = live.client.post("/v1/completions", json={"model": "gpt-4", "prompt": "hi"})
    locked = httpx.get(f"{live.processes.admin_url}/admin/weights").text
    empty: Any = SimpleNamespace(instances={}, model="demo", _last_seen=-math.inf)
    gone = str(Fleet.unavailable(empty))
    return {"The model does not exist": stranger.text, "A key is required": locked, "No instance": gone}


def told_to_publishers(live: LiveServer, checkpoint: Path) -> dict[str, str]:
    """By heading, of versions that are refused and of publishers that may not write."""
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).state_dict()
    config = json.loads((checkpoint / "config.json").read_text())
    first, second = (Publisher(live.processes.store, model=live.name) for _ in range(2))
    stray = Publisher(live.processes.store, model="dmeo")
    nan = {**weights, "model.norm.weight": torch.full_like(weights["model.norm.weight"], math.nan)}
    more = {**weights, "score.weight": torch.zeros(2, 2)}
    rotated = {**config, "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
    longer = {**config, "max_position_embeddings": 4096}

    def refused(publisher: Publisher, tensors: dict[str, Any], config: Any = None) -> str:
        return raised(lambda: publisher.publish(tensors, config=config))

    with contextlib.closing(first), contextlib.closing(second), contextlib.closing(stray):
        names = [refused(first, {f"module.{name}": w for name, w in weights.items()}), refused(first, more)]
        nowhere = raised(lambda: Publisher(model="demo"), HOTSWAP_STATE_DIR="nowhere")
        said = {
            "The names do not fit": "\n".join(names),
            "float32 into bfloat16": refused(first, {name: w.float() for name, w in weights.items()}),
            "A single instance cannot restart": refused(first, weights, rotated),
            "config_mismatch": refused(first, weights, longer),
            "Weights that are not finite": refused(first, nan),
            "The publisher finds no server": f"{nowhere}\n{refused(stray, weights)}",
        }
        second.hold()
        return said | {"Two trainers": refused(first, weights)}


def raised(call: Callable[[], object], **environment: str) -> str:
    """The text of the error that it raises."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises((WeightSyncError, ServerError)) as error:
            call()
    return str(error.value)


def test_every_metric_that_is_named_exists() -> None:
    ours, theirs = (ROOT / "docs" / "api.md").read_text(), (VLLM / "v1" / "metrics" / "loggers.py").read_text()
    for page in NOT_RUN:
        named = re.findall(
            r"`(hotswap_(?:gateway|instance|swap|active)\w+|vllm:\w+)`", (GUIDE / f"{page}.md").read_text()
        )
        assert all(f"`{n}`" in ours or f'"{n.removesuffix("_total")}"' in theirs for n in named), named


def check_command(words: list[str]) -> None:
    """The command exists, with these options; those of `up` that are not its own are vLLM's."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    match words:
        case []:
            pass
        case ["hotswap", *given]:
            context, command = Context(typer.main.get_command(app), info_name="hotswap"), None
            while command is None or hasattr(command, "commands") or hasattr(command, "list_commands"):
                group: Any = command or context.command
                command = group.get_command(context, given.pop(0))
            check_options(command, given)
        case ["vllm", "serve", *given]:
            check_vllm_options(given)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{re.escape(t)}:", makefile, re.MULTILINE) for t in targets if "=" not in t), (
                targets
            )
        case ["pip", "install", *_] | ["export", *_] | ["python", _]:
            pass
        case _:
            raise AssertionError(f"unknown: {words}")


def check_options(command: Command, given: list[str]) -> None:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    foreign = [word for word in given if word.startswith("-") and word.partition("=")[0] not in own]
    if foreign:
        assert command.name in ("up", "train", "train-server"), (command.name, foreign)
    if command.name == "up":
        check_vllm_options(foreign)
    elif foreign:
        assert {word.partition("=")[0] for word in foreign} <= {"--set", "--plan", "--show"}, foreign


def check_vllm_options(words: list[str]) -> None:
    known = "".join((VLLM / name).read_text() for name in OPTIONS_OF_VLLM)
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--")
            assert f'"--{name}"' in known or re.search(rf"\b{name.replace('-', '_')}\b", known), word


def check_imports(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


def example(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="example"))


def test_the_example_of_a_swap_commits_two_versions_refuses_one_and_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTSWAP_ARENA", str(tmp_path / "slots"))
    asyncio.run(example("swap_loop").main(tmp_path))
    printed = capsys.readouterr().out
    shows("published 2.0: serves as version 2\npublished nan: swap_aborted, ... values that are not finite", printed)
    assert printed.count("active: version 2") == 2
    streams = re.findall(r"stream of [ab]: (.+)", printed)
    assert [re.findall(r"version (\d) wrote", stream) for stream in streams] == [["0", "1", "2", "1"]] * 2
    assert not (tmp_path / "slots").exists()


@pytest.mark.parametrize("name", ["swap_loop", "rl_loop"])
def test_the_examples_use_public_names_alone(name: str) -> None:
    nodes = ast.walk(ast.parse((ROOT / "examples" / f"{name}.py").read_text()))
    taken = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
    assert [module for module in taken if module.split(".")[0] in ("weightsync", "server", "trainer")] == ["weightsync"]


@pytest.mark.engine
def test_the_example_of_reinforcement_learning_samples_from_what_it_has_published(
    live: LiveServer, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--model", live.name, "--url", live.url, "--store", live.processes.store)
    amount = ("--steps", "2", "--questions", "2", "--group", "2", "--max-tokens", "4")
    example("rl_loop").main([str(checkpoints["a"]), *where, *amount])
    first, second = re.findall(r"of 4 answers by version (\d+); serves as version (\d+)", capsys.readouterr().out)
    assert second[0] == first[1]
    assert int(first[0]) + 2 == int(second[0]) + 1 == int(second[1])
    live.push(checkpoints["a"])
