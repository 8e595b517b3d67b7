"""An instance with open answers gets SIGTERM: it says until when it goes on, and another one ends what it has not."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live import VLLM_ARGS, LiveServer
from tests.open_answers import Asked
from tests.waiting import wait_until
from weightsync.control.records import InstanceRecord, Keys
from weightsync.store import SyncStore

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.broad]
DRAIN_S = 0.3
TOKENS = 900


@pytest.fixture(scope="module")
def fleet(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    options = (*VLLM_ARGS, "--drain", str(DRAIN_S))
    server = LiveServer(checkpoints["say-1"], tmp_path_factory.mktemp("leaving"), options, instances=2)
    with server.running():
        yield server


def test_answers_that_outlast_the_notice_end_elsewhere(fleet: LiveServer) -> None:
    wait_until(fleet.whole, 300)
    announced: list[InstanceRecord] = []
    store, ended = SyncStore(fleet.processes.store), threading.Event()
    first = fleet.processes.instance_id(0)

    def follow() -> None:
        while not ended.is_set():
            found = store.get(Keys(fleet.name).instance(first))
            record = InstanceRecord.from_json(found.value) if found is not None else None
            announced.extend([record] if record is not None and record.state == "DRAINING" else [])

    following = threading.Thread(target=follow)
    following.start()
    try:
        asked = [Asked(fleet.url, TOKENS, stream=index % 8 != 0) for index in range(32)]
        wait_until(lambda: all(one.tokens for one in asked if one.stream), 60)
        assert all(row["in_flight"] for row in fleet.instances())
        told = time.time()
        child = fleet.processes.children["instance-0"]
        child.process.send_signal(signal.SIGTERM)
        child.process.wait(60)
    finally:
        ended.set()
        following.join()
        store.close()
    answers = [one.finish() for one in asked]
    assert answers == [[101] * TOKENS] * len(asked)
    assert announced, "nobody could know"
    assert told < announced[0].leaves_at <= time.time() + DRAIN_S  # type: ignore[operator]
    found = re.search(
        r"^hotswap_gateway_failovers_total\{.*resumed.*\} (\d+)", httpx.get(f"{fleet.url}/metrics").text, re.MULTILINE
    )
    assert found is not None
    assert int(found[1]) > 0, "no stream outlasted the notice"
    log = child.log.read_text()
    assert "Traceback" not in log, log[-4000:]
    assert child.process.returncode == 0


def test_an_instance_that_comes_back_is_asked_again(fleet: LiveServer) -> None:
    wait_until(fleet.whole, 300)
    assert [row["leaves_at"] for row in fleet.instances()] == [None, None]
