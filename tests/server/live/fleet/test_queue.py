"""The queue in front of a real engine that runs two requests at a time: bursts, priorities, overload."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import LiveServer
from tests.waiting import comes_true, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.broad]
BURST, FRESH = "key-that-sends-in-bursts", "key-that-asks-now-and-then"
QUEUED = 24


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"sha256:{hashlib.sha256(k.encode()).hexdigest()} {k}\n" for k in (BURST, FRESH)))
    keys.chmod(0o600)
    args = ("--max-model-len", "1024", "--max-num-seqs", "2")
    more = {"api_key_file": keys, "gateway_args": ("--max-queued", str(QUEUED), "--max-queue-wait", "200")}
    live = LiveServer(checkpoints["a"], tmp_path_factory.mktemp("state"), vllm_args=args, **more)
    with live.running():
        yield live


class Clients:
    """Requests in threads, and the order in which they were answered."""

    def __init__(self, server: dict[str, Any], pool: ThreadPoolExecutor) -> None:
        self._server, self._pool = server, pool
        self.order: list[str] = []
        self.answers: list[Future[httpx.Response]] = []

    def ask(self, name: str, headers: dict[str, str], tokens: int = 60, **body: Any) -> None:
        self.answers.append(self._pool.submit(self._ask, name, headers, tokens, body))

    def _ask(self, name: str, headers: dict[str, str], tokens: int, body: dict[str, Any]) -> httpx.Response:
        wanted = {"prompt_token_ids": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": False}
        with httpx.Client(**self._server, timeout=250) as client:
            answer = client.post("/generate", json=wanted | body, headers=headers)
        self.order.append(name)
        return answer

    def statuses(self) -> Counter[int]:
        return Counter(f.result().status_code for f in self.answers)


def bearer(key: str, **headers: object) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | {f"x-hotswap-{k}": str(v) for k, v in headers.items()}


def waiting(live: LiveServer) -> float:
    return live.gateway_metric("hotswap_gateway_queue_depth")


def test_the_instance_says_what_it_runs_and_the_gateway_keeps_to_it(server: LiveServer) -> None:
    assert server.instance()["max_num_seqs"] == 2
    assert server.gateway_metric("hotswap_instance_in_flight_limit") == 3.0


def test_a_burst_of_one_key_starves_neither_another_key_nor_an_urgent_request(server: LiveServer) -> None:
    with ThreadPoolExecutor(32) as pool:
        clients = Clients({"base_url": server.url}, pool)
        with server.paused():
            for _ in range(QUEUED - 3):
                clients.ask("burst", bearer(BURST, priority=5))
            wait_until(lambda: waiting(server) == QUEUED - 6, 60)
            for _ in range(2):
                clients.ask("fresh", bearer(FRESH, priority=5))
            clients.ask("urgent", bearer(BURST))
            wait_until(lambda: waiting(server) == QUEUED - 3, 60)
        assert clients.statuses() == {200: QUEUED}
    # Ahead of each: what already was at the engine (3), its turns shared with the burst, and what ran beside it.
    assert clients.order.index("urgent") < 8
    assert max(i for i, name in enumerate(clients.order) if name == "fresh") < 12


def test_the_engine_goes_by_class_and_a_body_cannot_leave_its_own(server: LiveServer) -> None:
    """Asked directly, as the gateway asks it, so that all of them wait inside the engine."""
    order: list[str] = []
    for _ in range(10):  # until all have come while the long ones ran
        if order := all_waited(server):
            break
    assert set(order[:2]) == {"first", "later"}
    assert order[2:] == ["patient", "patient"]


def all_waited(server: LiveServer) -> list[str]:
    with ThreadPoolExecutor(16) as pool:
        clients = Clients(server.direct()[0], pool)
        for _ in range(2):
            clients.ask("long", {"x-hotswap-priority": "-9"}, tokens=1000)
        wait_until(lambda: len(clients.order) == 2 or server.engine_metric("vllm:num_requests_running") == 2, 60)
        for name, header, own in (("patient", "5", -1000), ("patient", "5", 0), ("later", "0", 900), ("first", "0", 0)):
            clients.ask(name, {"x-hotswap-priority": header}, priority=own)
        late = not comes_true(lambda: len(clients.order) or server.engine_metric("vllm:num_requests_waiting") == 4, 60)
        late = late or bool(clients.order)
        assert clients.statuses() == {200: 6}
    return [] if late else [name for name in clients.order if name != "long"]
