"""docs/extend.md: each example runs as it stands on the page, against the place that it extends."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from server.gateway import QueueSettings, UpstreamSettings
from server.gateway.fleet import routing
from server.gateway.fleet.view import Fleet
from server.gateway.metrics import Counted
from server.gateway.models.directory import Directory
from server.gateway.models.served import Served
from server.gateway.observe.stats import Stats
from server.gateway.queue.gate import Gate
from tests.trainer.algorithms.batches import Trial, groups
from tests.weightsync.codes import refused
from trainer.algorithms import build_algorithm
from trainer.config import EnvironmentConfig, RewardConfig
from trainer.config.algorithms import AlgorithmConfig
from trainer.config.strict import convert
from trainer.environments import EnvironmentHost, Task
from trainer.rewards import RewardRequest, build_scorer
from weightsync import Publisher, SlotReader
from weightsync.peer.shelf import Regions
from weightsync.publish.publisher import as_schema
from weightsync.publish.spread import Gatherer
from weightsync.store import SyncStore
from weightsync.transport import Piece

PAGE = (Path(__file__).parents[1] / "docs" / "extend.md").read_text()


def blocks(section: str, language: str = "python", page: str = PAGE) -> list[str]:
    """The code of one section."""
    text = re.split(rf"^## {section}$", page, flags=re.MULTILINE)[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(name: str, code: str) -> dict[str, Any]:
    """The names that the code defines, as a module of that name."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # msgspec looks its annotations up there
    exec(compile(code, f"docs/extend.md: {name}", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def test_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,), (settings,) = blocks("A reward"), blocks("A reward", "yaml")
    (tmp_path / "brevity.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    configs = convert(tuple[RewardConfig, ...], yaml.safe_load(settings)["rewards"], "rewards")
    scorer = build_scorer(configs)
    try:
        scores = [
            asyncio.run(scorer(RewardRequest("3+4=", answer, "7"))).total for answer in ("7", "8", "7".rjust(40, "."))
        ]
    finally:
        scorer.close()
    assert scores == [0.5, 0.0, 0.25]


@pytest.mark.parametrize("page", ["extend.md", "trainer/rewards.md"])
def test_the_reward_of_a_group(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heading = {"extend.md": "A reward for a whole group", "trainer/rewards.md": "Rewards of a whole group"}[page]
    text = (Path(__file__).parents[1] / "docs" / page).read_text()
    (code,), (settings,) = blocks(heading, page=text), blocks(heading, "yaml", page=text)
    (tmp_path / f"{code.split('.py')[0].removeprefix('# ')}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    scorer = build_scorer(convert(tuple[RewardConfig, ...], yaml.safe_load(settings)["rewards"], "rewards"))

    async def totals() -> list[float]:
        requests = [
            RewardRequest("3+4=", answer.strip(), "7", tokens=len(answer)) for answer in ("7", "7 ", "7  ", "8")
        ]
        alone = [await scorer(request) for request in requests]
        return [score.total for score in await scorer.compared(requests, alone)]

    try:
        found = asyncio.run(totals())
    finally:
        scorer.close()
    expected = {"extend.md": [1.5, 1.25, 1.0, 0.0], "trainer/rewards.md": [*[1 + 0.1 / 3] * 3, 0.1]}
    assert found == pytest.approx(expected[page])


async def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,), (settings,) = blocks("An environment"), blocks("An environment", "yaml")
    (tmp_path / "echo.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = convert(EnvironmentConfig, yaml.safe_load(settings)["environment"], "environment")
    host = EnvironmentHost(config)
    await host.open()
    try:
        episode, first = await host.begin(Task("", [], answer="ab"))
        seen = [await episode.step(letter) for letter in ("a", "x")]
        await episode.close()
    finally:
        await host.close()
    assert "Spell ab" in first.messages[0]["content"]
    assert [(s.reward, s.done) for s in seen] == [(1.0, False), (0.0, True)]


def test_the_algorithm() -> None:
    names = run("median", "\n".join(blocks("An algorithm")))
    (settings,) = blocks("An algorithm", "yaml")
    config = convert(AlgorithmConfig | names["MedianConfig"], yaml.safe_load(settings)["algorithm"], "algorithm")
    assert isinstance(config, names["MedianConfig"])
    algorithm = names["Median"](config)
    assert algorithm.credit([1.0, 0.0, 0.5, 0.25]) == [0.625, -0.375, 0.125, -0.125]
    trial = Trial(algorithm, algorithm.sequences([], groups(3, config.samples_per_prompt, seed=1)))
    output = trial.loss()
    assert trial.gradient(output.total / output.denominator).abs().sum() > 0


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_loss(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says it, token by token in float64: loss and gradient."""
    (code,), (settings,) = blocks("A loss"), blocks("A loss", "yaml")
    (tmp_path / "topr.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = convert(AlgorithmConfig, yaml.safe_load(settings)["algorithm"], "algorithm")
    algorithm, batch = build_algorithm(config), groups(3, config.samples_per_prompt, seed=1)
    trial = Trial(algorithm, algorithm.sequences([], batch), packed=packed)
    answers = [t for group in batch for t in group.trajectories]
    centred = torch.tensor([r - sum(g.rewards) / len(g.rewards) for g in batch for r in g.rewards]).double()
    terms, tapers = [], []
    for answer, advantage, logprobs in zip(answers, centred, trial.logprobs, strict=True):
        behaviour = torch.tensor(answer.logprobs, dtype=torch.float32).double()
        ratio = math.exp(sum(now.item() - then.item() for now, then in zip(logprobs, behaviour, strict=True)))
        taper = min(ratio, 1.0) if advantage < 0 else 1.0
        terms += [-taper * advantage * logprob for logprob in logprobs]
        tapers += [taper] * len(logprobs)
    output = trial.check(torch.stack(terms).sum() / len(terms))
    assert output.sums["custom/taper"].item() == pytest.approx(sum(tapers))
    assert min(tapers) < 1.0 < sum(tapers)


HOLDER = """
import json, sys
import numpy as np
from weightsync import join
from weightsync.peer.shelf import Regions
from weightsync.publish.publisher import as_schema
from weightsync.publish.spread import HostShare, MemorySlot
names = {{}}
exec(open({code!r}).read(), names)
schema, transport = as_schema([("a", "float32", (1000, 1000))]), names["ProcessTransport"]()
share = HostShare(MemorySlot(schema), "m", 1, schema, [])
writer = join(share.ticket, 1)
writer.write("a", np.arange(1000000, dtype=np.float32).reshape(1000, 1000))
print(json.dumps(share.settle([writer.seal()], Regions(transport), transport.endpoint)), flush=True)
sys.stdin.read()
"""


def test_the_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("A transport")
    (tmp_path / "process.py").write_text(code)
    transport = run("process", code)["ProcessTransport"]()
    script = HOLDER.format(code=str(tmp_path / "process.py"))
    monkeypatch.setenv("HOTSWAP_ARENA", str(tmp_path / "slots"))
    SyncStore(f"sqlite://{tmp_path}/store.db").close()
    with (
        Publisher(f"sqlite://{tmp_path}/store.db", model="m") as publisher,
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder,
    ):
        assert holder.stdout is not None
        part, offer = json.loads(holder.stdout.readline())
        draft = publisher.begin(as_schema([("a", "float32", (1000, 1000))]))
        assert Gatherer(transport, Regions(transport)).gather(offer, draft) >= 4_000_000
        draft.commit(part)
        record = publisher.versions()[-1]
        with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as reader:
            reader.verify_all()
            assert bytes(reader.buffer("a")) == np.arange(1_000_000, dtype=np.float32).tobytes()
        link, into = (
            transport.connect(f"process:{holder.pid}".encode()),
            transport.register(bytearray(10), writable=True),
        )
        region, first = base64.b64decode(offer["region"]), offer["strips"][0][0]
        link.read(into, region, [Piece(2, first + 4, 8)], 60.0)
        assert bytes(into.view)[2:] == np.arange(1, 3, dtype=np.float32).tobytes()
        with refused("transfer_failed", match="beyond"):
            link.read(into, region, [Piece(0, 0, 11)], 60.0)
        holder.kill()
        holder.wait()
        with refused("transfer_failed"):
            link.read(into, region, [Piece(0, 0, 10)], 60.0)


def test_the_metric() -> None:
    (code,) = blocks("A metric")
    imports, _, row = code.partition("\nDeclared(")
    declared = run("metric", f"{imports}\nrow = Declared({row}")["row"]
    stats, directory = Stats(), Directory()
    fleet = Fleet(None, "toy", UpstreamSettings(), stats)  # type: ignore[arg-type]
    directory.use([Served("toy", fleet, Gate(fleet, QueueSettings()), stats)], {})
    counted = Counted(stats.process, directory)
    assert declared.family(counted).samples == []
    states = ("SERVING", "SERVING", "STAGING")
    fleet.instances = {str(n): SimpleNamespace(record=SimpleNamespace(state=s)) for n, s in enumerate(states)}  # type: ignore[misc]
    samples = declared.family(counted).samples
    assert {(s.name, s.labels["state"], s.value) for s in samples} == {
        ("hotswap_gateway_instances", "SERVING", 2.0),
        ("hotswap_gateway_instances", "STAGING", 1.0),
    }
    assert declared.row().startswith(
        "| `hotswap_gateway_instances` | gauge | `model`, `state` (as in `hotswap status`) |"
    )


def test_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,), (command,) = blocks("A routing policy"), blocks("A routing policy", "sh")
    (tmp_path / "two_choices.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    policy = routing.find(command.split("--routing ")[1].strip())

    def candidate(load: float, cached: float = 0.0) -> Any:
        return SimpleNamespace(state="SERVING", load=load, failed_at=0.0, picked_at=0, cached=lambda _: cached)

    busy, idle, warm = candidate(9.0), candidate(1.0), candidate(5.0, cached=0.9)
    assert routing.pick([busy, idle], 1.0, policy=policy) is idle
    assert routing.pick([busy, idle, warm], 1.0, policy=policy) is warm


ROUTE = """
from server import api
{imports}
api.ROUTES += (Forwarded({row},)
from server.gateway.routes import public_names
assert "/v2/embed" in public_names()
assert "| `POST /v2/embed` | Cohere's embeddings" in api.table()
"""


def test_the_route() -> None:
    """In a process of its own: what derives from the table is made on import."""
    (code,) = blocks("A forwarded route")
    imports, _, row = code.partition("\nForwarded(")
    script = ROUTE.format(imports=imports, row=row.rstrip())
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


LIMIT = """
import sys, time, types
from pathlib import Path

path = Path("server/key_limits.py")
before, method, after = path.read_text().partition("    @property\\n    def bounded")
module = types.ModuleType("server.key_limits")
sys.modules["server.key_limits"] = module  # as if the field were in the file
exec(before + {field!r} + "\\n" + method + after, module.__dict__)

from collections import Counter
import typer
from pydantic import ValidationError
from server.cli.keys import app
from server.errors import HttpError
from server.gateway.access.keys import Principal
from server.gateway.access.limits import Limits
from server.gateway.access.records import KeyLimits
from server.gateway.admin import keys
from server.gateway.observe.stats import ProcessStats
from server.gateway.wire.bodies import Usage, check_object

time.monotonic = lambda: 1000.0  # a second that passes between two requests changes what is told of them
limits = KeyLimits(output_tokens_per_min=100)
assert KeyLimits.from_json(limits.to_json()) == limits and limits.bounded
assert keys.Limits(output_tokens_per_min=100).on(KeyLimits()) == limits
try:
    keys.Limits(output_tokens_per_min=0)
except ValidationError:
    pass
else:
    raise AssertionError("no bound")
create = typer.main.get_command(app).commands["create"]
assert {option!r} in [name for parameter in create.params for name in parameter.opts]
stats = ProcessStats()
assert stats.limited["output_tokens"] == 0
gateway, key = Limits(stats.limited), Principal("p", frozenset(), id="p", limits=limits)
body = b'{{"prompt":"' + b"x" * 4000 + b'","max_tokens":60}}'
def ask():
    return gateway.admit(key, check_object(body), "/v1/completions", body)
first = ask()
assert b"x-ratelimit-remaining-output-tokens: 40" in first.head
try:
    ask()
except HttpError as refused:
    assert refused.code == "output_tokens_limit" and refused.retry_after_s == 61
else:
    raise AssertionError("not limited")
first.settle(Usage(1000, 10), 200)
assert b"x-ratelimit-remaining-output-tokens: 30" in ask().head
assert stats.limited == Counter(output_tokens=1)
assert "| `output_tokens_per_min` | tokens of answers alone" in module.table()
"""


def test_the_limit() -> None:
    """In a process of its own: what derives from the field is made on import."""
    (code,), (command,) = blocks("A limit"), blocks("A limit", "sh")
    start = code.index("\noutput_tokens_per_min") + 1
    field = textwrap.indent(code[start:], "    ")
    script = LIMIT.format(field=field, option=command.split()[4])
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])
