"""Versions with other tensors than the one before: two real instances restart one by one, and clients notice nothing.

Every answer says which version wrote which token, and those are the tokens of a fresh stock engine of that version.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from loadtest.models.kinds import make_kind
from tests import stock
from tests.asking import Asking
from tests.cpu import avx512_only
from tests.live import LiveServer
from tests.waiting import wait_until
from weightsync import RemotePublisher
from weightsync.control.forms import MOST_STARTS
from weightsync.control.records import Keys, StartRecord
from weightsync.store import SyncStore

pytestmark = [pytest.mark.engine, pytest.mark.broad, pytest.mark.timeout(1800)]  # restarts import vLLM anew
PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(20 + 17 * i)] for i in range(3)]
TOKENS = 24
PATIENCE_S = 600.0
TIED = {"tie_word_embeddings": True}


class Clients(Asking):
    """One for each prompt; `failures` has what another engine would not say, too."""

    def __init__(self, url: str, expected: dict[int, list[list[int]]]) -> None:
        """`expected`: the answers of each version."""
        super().__init__(url, len(PROMPTS))
        self.expected = expected
        self.answered: Counter[int] = Counter()  # by the version that wrote the last token

    def question(self, client: int) -> dict[str, Any]:
        return {"prompt_token_ids": PROMPTS[client], "max_tokens": TOKENS}

    def take(self, client: int, choice: dict[str, Any]) -> None:
        first, last = choice["weight_versions"][0], choice["weight_versions"][-1]
        tokens = choice["token_ids"][: first["end"]]
        said = self.expected.get(first["version"])
        if said is not None and tokens != said[client][: len(tokens)]:
            self.failures.append(f"prompt {client}, version {first['version']}: {tokens}")
        self.answered[last["version"]] += 1


def said(live: LiveServer) -> list[list[int]]:
    return [live.generate(prompt, TOKENS)["choices"][0]["token_ids"] for prompt in PROMPTS]


def ask(live: LiveServer, route: str, **body: Any) -> httpx.Response:
    return live.admin.post(f"/admin/weights{route}", json=body, timeout=PATIENCE_S)


def following(live: LiveServer) -> int:
    """The number of the next version."""
    return 1 + max(int(v["version"]) for v in live.admin.get("/admin/weights").json()["versions"])


def attempts(live: LiveServer, name: str, target: int) -> int:
    """How often the instance was started for the swap to `target`, in flight or the last one."""
    with contextlib.closing(SyncStore(live.processes.store)) as store:
        found = store.get(Keys(live.name).start(name))
    started, swap = StartRecord.from_json(found.value) if found is not None else None, swap_of(live)
    if started is None or (swap["target"], swap["id"]) != (target, started.swap_id):
        return 0
    return started.attempts


def swap_of(live: LiveServer) -> dict[str, Any]:
    return dict(live.admin.get("/admin/swap").json()["swap"] or {"target": None, "id": None})


def epoch_of(live: LiveServer) -> int:
    return int(live.admin.get("/admin/weights/active").json()["epoch"])


class Fleet:
    """Two instances of `live`, the checkpoint they began with, and its answers."""

    def __init__(self, live: LiveServer, base: Path) -> None:
        self.live, self.base, self.answers = live, base, stock.answers(base, PROMPTS, TOKENS)

    def back_at_the_base(self) -> int:
        """Its version, served by both."""
        active = self.live.active()
        if said(self.live) != self.answers:
            answer = ask(self.live, "", path=str(self.base))
            assert answer.status_code == 200, answer.text
            active = answer.json()["version"]
        wait_until(lambda: self.live.all_serve(active), PATIENCE_S)
        return active


@contextlib.contextmanager
def supervised(live: LiveServer) -> Iterator[None]:
    """Processes that have ended are started again, as by `hotswap up`."""
    done = threading.Event()

    def supervise() -> None:
        while not done.wait(0.1):
            live.processes.restart_ended()

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        yield
    finally:
        done.set()
        supervisor.join()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    base = make_kind(tmp_path_factory.mktemp("base"), "llama", **TIED)
    live = LiveServer(base, tmp_path_factory.mktemp("shapes"), ("--max-model-len", "512"), name="shapes", instances=2)
    with live.running(), supervised(live):
        yield Fleet(live, base)


def push(live: LiveServer, directory: Path) -> httpx.Response:
    return ask(live, "", path=str(directory), drain_s=5)


def from_another_host(live: LiveServer, directory: Path) -> int:
    """Its version, which is not activated."""
    publisher = RemotePublisher(live.processes.admin_url, str(live.processes.admin_key), live.name)
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    return publisher.publish(tensors, config=config, activate=False, timeout_s=PATIENCE_S)


def pid_of(live: LiveServer, index: int) -> int:
    return int(live.instances()[index]["pid"])


def test_what_no_restart_can_take_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    """A vocabulary that the served tokenizer does not have; and nothing restarts for it."""
    live, before = fleet.live, fleet.back_at_the_base()
    other = make_kind(tmp_path / "other", "llama", vocab_size=640, **TIED)
    answer = ask(live, "", path=str(other))
    problem = answer.json()["error"]
    assert (answer.status_code, problem["code"]) == (422, "config_mismatch")
    assert "vocab_size" in problem["message"]
    wait_until(lambda: live.all_serve(before), PATIENCE_S)


@avx512_only
def test_other_tensors_come_by_restarts_and_go_by_them(fleet: Fleet, tmp_path: Path) -> None:
    """One restart is killed, and goes on; another version cannot be loaded, and is taken back."""
    live, before = fleet.live, fleet.back_at_the_base()
    after, second = following(live), pid_of(live, 1)
    other = make_kind(tmp_path / "other", "w4a16", **TIED)
    answers = stock.answers(other, PROMPTS, TOKENS)
    with Clients(live.url, {before: fleet.answers, after: answers}) as clients:
        done: list[httpx.Response] = []
        pushing = threading.Thread(target=lambda: done.append(push(live, other)))
        pushing.start()
        wait_until(lambda: attempts(live, "instance-0", after) == 1, PATIENCE_S)
        psutil.Process(live.processes.children["instance-0"].process.pid).kill()
        pushing.join(PATIENCE_S)
        assert done[0].status_code == 200, done[0].text
        assert done[0].json()["version"] == after
        assert done[0].json()["swap"]["ok"]
        assert attempts(live, "instance-0", after) == 2
        swap = swap_of(live)
        assert (swap["phase"], swap["mode"]) == ("done", "rolling")
        assert "weight_packed" in swap["changes"]
        wait_until(lambda: live.all_serve(after), PATIENCE_S)
        wait_until(lambda: clients.answered[after] > len(PROMPTS), PATIENCE_S)
        assert said(live) == answers

        bad = make_kind(tmp_path / "bad", "llama", num_hidden_layers=3)
        # Of two layers: vLLM starts, and cannot load the third.
        broken = json.loads((bad / "config.json").read_text()) | {"num_hidden_layers": 2}
        (bad / "config.json").write_text(json.dumps(broken))
        answer = push(live, bad)
        problem = answer.json()["error"]
        assert (answer.status_code, problem["code"]) == (409, "swap_aborted")
        assert "layers.2" in problem["message"]
        wait_until(lambda: live.all_serve(after), PATIENCE_S)
        assert swap_of(live)["phase"] == "aborted"
        assert said(live) == answers

        back = ask(live, "/rollback", drain_s=5)
        assert back.status_code == 200, back.text
        wait_until(lambda: live.all_serve(before), PATIENCE_S)
        assert said(live) == fleet.answers
    assert not clients.failures
    assert pid_of(live, 1) == second, "its supervisor sees no process end"


def test_one_that_does_not_start_after_the_commit_takes_all_back(fleet: Fleet, tmp_path: Path) -> None:
    """A version from another host. A file lies where the second instance is to have its configuration, so that its
    process ends at each start."""
    live, before = fleet.live, fleet.back_at_the_base()
    other = make_kind(tmp_path / "other", "llama", seed=3, tie_word_embeddings=False)
    answers = {before: fleet.answers}
    after = from_another_host(live, other)
    answers[after] = stock.answers(other, PROMPTS, TOKENS)
    (record,) = [v for v in live.admin.get("/admin/weights").json()["versions"] if v["version"] == after]
    blocked = Path(record["slot"]).parent / f"config-{record['form']}-instance-1"
    shutil.rmtree(blocked, ignore_errors=True)
    blocked.write_text("in the way")
    epoch, first = epoch_of(live), pid_of(live, 0)
    with Clients(live.url, answers) as clients:
        try:
            answer = ask(live, "/activate", version=after, drain_s=5)
            problem = answer.json()["error"]
            assert (answer.status_code, problem["code"]) == (409, "swap_aborted")
            assert "instance-1 did not start with it" in problem["message"]
            wait_until(lambda: live.all_serve(before), PATIENCE_S)
            assert clients.answered[after] > 0, "it was committed, and served by the first instance"
        finally:
            blocked.unlink()
    assert not clients.failures
    swap = swap_of(live)
    assert "lm_head.weight is new" in swap["changes"]
    assert attempts(live, "instance-1", after) == MOST_STARTS
    assert (swap["phase"], swap["canary"], epoch_of(live)) == ("aborted", "instance-0", epoch + 2)
    assert said(live) == fleet.answers
    assert pid_of(live, 0) == first, "its supervisor sees no process end"


def test_the_same_tensors_under_another_configuration(fleet: Fleet, tmp_path: Path) -> None:
    """And with another chat template."""
    live, before = fleet.live, fleet.back_at_the_base()
    other = with_another_rope(fleet.base, tmp_path / "other")
    prompt = rendered(live)
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} and {% endfor %}")
    expected = stock.answers(other, PROMPTS, TOKENS)
    assert expected != fleet.answers
    answer = ask(live, "", path=str(other), drain_s=5)
    assert answer.status_code == 200, answer.text
    assert swap_of(live)["changes"] == "config.json has another chat_template, rope_parameters"
    wait_until(lambda: live.all_serve(int(answer.json()["version"])), PATIENCE_S)
    assert said(live) == expected
    assert len(rendered(live)) > len(prompt)
    assert ask(live, "/rollback", drain_s=5).status_code == 200
    wait_until(lambda: live.all_serve(before), PATIENCE_S)
    assert said(live) == fleet.answers
    assert rendered(live) == prompt


def rendered(live: LiveServer) -> list[int]:
    """The token ids of a conversation."""
    messages = {"model": live.name, "messages": [{"role": "user", "content": "hi"}]}
    return live.client.post("/tokenize", json=messages).raise_for_status().json()["tokens"]  # type: ignore[no-any-return]


def with_another_rope(checkpoint: Path, path: Path) -> Path:
    shutil.copytree(checkpoint, path)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] |= {"rope_theta": 100.0}
    (path / "config.json").write_text(json.dumps(config))
    return path
