"""Webhooks: each entry of the ledger, signed, in order and at least once, whatever the receiver and the gateway do."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.errors import ConfigError
from server.gateway.config import WebhookSettings
from server.gateway.observe import ledger
from server.ledger import archive
from tests.server.gateway.harness import ADMIN_KEY, MODEL, RunningGateway, admin, gateway_process, get, running_gateway
from tests.waiting import eventually, wait_until
from weightsync.control import chain
from weightsync.control.chain import LedgerEntry
from weightsync.store import SyncStore

ASKS = {"authorization": f"Bearer {ADMIN_KEY}"}
SECRET, OTHER = ("whsec_" + base64.b64encode(letter * 32).decode() for letter in (b"a", b"b"))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "RETRY_S", 0.01)


class Receiver(ThreadingHTTPServer):
    """Takes messages, and refuses as many as `refuses` says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken: list[tuple[dict[str, str], bytes]] = []
        self.refused: list[str] = []  # ids
        self.refuses = 0
        self.before_answer: Callable[[int], object] = lambda _: None

    @property
    def url(self) -> str:
        return f"http://user:secret@127.0.0.1:{self.server_port}/hook?token=1"

    @property
    def numbers(self) -> list[int]:
        return [json.loads(body)["data"]["number"] for _, body in self.taken]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        refuse = self.server.refuses > 0
        if self.abandoned():
            return
        if refuse:
            self.server.refuses -= 1
            self.server.refused.append(self.headers["webhook-id"])
        else:
            self.server.taken.append(({k.lower(): v for k, v in self.headers.items()}, body))
            self.server.before_answer(len(self.server.taken))
        with contextlib.suppress(OSError):  # who asked may be dead
            self.send_response(500 if refuse else 204)
            self.end_headers()

    def abandoned(self) -> bool:
        """Whether the gateway that asked has ended, which takes no answer; who leads next asks again."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


@contextlib.contextmanager
def gateway_of(directory: Path, *urls: str) -> Iterator[RunningGateway]:
    key = directory / "hook.key"
    if not key.exists():
        key.write_text(f"{SECRET}\n")
        key.chmod(0o600)
    with running_gateway(directory, webhooks=WebhookSettings(urls, key)) as running:
        wait_until(lambda: running.gateway.default.coordinator.leads)
        hooks = running.gateway.webhooks._hooks
        wait_until(lambda: all(hook.number is not None for hook in hooks))
        yield running


async def new_keys(gateway: RunningGateway, *names: str) -> None:
    for name in names:
        assert (await admin(gateway, "POST", "?reason=tried", name=name)).status == 200


def signatures(headers: dict[str, str], body: bytes, *secrets: str) -> str:
    """The header as it must be, by the specification's words."""
    content = b".".join([headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body])
    keys = [base64.b64decode(secret.removeprefix("whsec_")) for secret in secrets]
    return " ".join("v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in keys)


async def test_each_entry_is_posted_once_in_order_and_signed(tmp_path: Path, receiver: Receiver) -> None:
    with gateway_of(tmp_path, receiver.url) as gateway:
        await new_keys(gateway, "one", "two", "three")
        await eventually(lambda: len(receiver.taken) == 3)
        url = f"http://127.0.0.1:{receiver.server_port}/hook"
        (counts,) = gateway.gateway.webhooks.counts.values()
        await eventually(lambda: (counts.outcomes["delivered"], counts.behind) == (3, 0))
        page = (await gateway.ask(get("/metrics"))).body.decode()
    assert f'hotswap_webhook_deliveries_total{{outcome="delivered",url="{url}"}} 3.0' in page
    assert f'hotswap_webhook_behind{{url="{url}"}} 0.0' in page
    assert receiver.numbers == [1, 2, 3]
    for headers, body in receiver.taken:
        told: dict[str, Any] = json.loads(body)
        assert (told["type"], told["data"]["reason"]) == ("ledger.key_create", "tried")
        assert headers["webhook-id"] == f"msg_{told['data']['digest'][:32]}"
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
        assert headers["webhook-signature"] == signatures(headers, body, SECRET)
        assert headers["content-type"] == "application/json"
    assert len({headers["webhook-id"] for headers, _ in receiver.taken}) == 3


async def test_what_is_refused_is_sent_again_before_what_comes_after(tmp_path: Path, receiver: Receiver) -> None:
    with gateway_of(tmp_path, receiver.url) as gateway:
        receiver.refuses = 3
        await new_keys(gateway, "one", "two")
        await eventually(lambda: len(receiver.taken) == 2)
        (counts,) = gateway.gateway.webhooks.counts.values()
        await eventually(lambda: counts.outcomes["delivered"] == 2)
        assert counts.outcomes["failed"] == 3
    assert receiver.numbers == [1, 2]
    assert set(receiver.refused) == {receiver.taken[0][0]["webhook-id"]}


async def test_who_leads_next_goes_on_and_a_new_url_begins_with_what_comes(tmp_path: Path, receiver: Receiver) -> None:
    with gateway_of(tmp_path, receiver.url) as gateway:
        await new_keys(gateway, "one")
        await eventually(lambda: receiver.numbers == [1])
        receiver.refuses = 10_000
        await new_keys(gateway, "two", "three")
        await eventually(lambda: receiver.refused)
    receiver.refuses = 0
    with Receiver() as late:
        threading.Thread(target=late.serve_forever, args=(0.01,), daemon=True).start()
        with gateway_of(tmp_path, receiver.url, late.url) as gateway:
            await eventually(lambda: receiver.numbers == [1, 2, 3])
            await new_keys(gateway, "four")
            await eventually(lambda: receiver.numbers == [1, 2, 3, 4])
            await eventually(lambda: late.numbers == [4])
        late.shutdown()


async def test_what_has_left_the_store_is_lost_and_counted(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.ledger.FILE", 5)
    with gateway_of(tmp_path, receiver.url) as gateway:
        receiver.refuses = 10_000
        await new_keys(gateway, "first")
        await eventually(lambda: receiver.refused)
    store = SyncStore(f"sqlite://{tmp_path / 'store.db'}")
    try:
        for number in range(11):
            store.run(chain.append(store.store, {}, {}, LedgerEntry("policy", "somebody", subject=str(number))))
        assert store.run(archive(store.store, str(tmp_path / "ledger"), kept=0)) == 10
    finally:
        store.close()
    receiver.refuses = 0
    with gateway_of(tmp_path, receiver.url) as gateway:
        await eventually(lambda: receiver.numbers == [11, 12])
        (counts,) = gateway.gateway.webhooks.counts.values()
        assert counts.outcomes["lost"] == 10


async def test_a_changed_file_signs_with_its_secrets_and_a_bad_one_changes_nothing(
    tmp_path: Path, receiver: Receiver
) -> None:
    with gateway_of(tmp_path, receiver.url) as gateway:
        for text, secrets in ((f"{OTHER}\n{SECRET}\n", (OTHER, SECRET)), ("nonsense\n", (OTHER, SECRET))):
            (tmp_path / "hook.key").write_text(text)
            receiver.taken.clear()
            await new_keys(gateway, "one")
            await eventually(lambda: receiver.taken)
            ((headers, body),) = receiver.taken
            assert headers["webhook-signature"] == signatures(headers, body, *secrets)


async def test_entries_of_another_model_are_its_gateways(tmp_path: Path, receiver: Receiver) -> None:
    with gateway_of(tmp_path, receiver.url) as gateway:
        for model in ("other", MODEL):
            entry = LedgerEntry("publish", "somebody", model=model, version=1)
            gateway.store.run(chain.append(gateway.store.store, {}, {}, entry))
        await eventually(lambda: receiver.taken)
    assert receiver.numbers == [2]


async def test_a_receiver_that_is_away_keeps_nobody_waiting(tmp_path: Path) -> None:
    with gateway_of(tmp_path, "http://127.0.0.1:1/hook") as gateway:
        await new_keys(gateway, "one", "two")
        (counts,) = gateway.gateway.webhooks.counts.values()
        await eventually(lambda: counts.outcomes["failed"] > 1 and counts.behind == 2)
        assert counts.outcomes["delivered"] == 0


def delivers(directory: Path) -> bool:
    """Whether a gateway has begun to lead, and to look for entries."""
    with contextlib.closing(SyncStore(f"sqlite://{directory / 'store.db'}")) as store:
        return bool(store.list("gateway/webhooks/")[0])


def make_keys(url: str, *names: str) -> None:
    for name in names:
        assert httpx.post(f"{url}/admin/keys", json={"name": name}, headers=ASKS, timeout=60).status_code == 200


@pytest.mark.broad
def test_the_gateway_that_leads_is_killed_while_it_delivers(tmp_path: Path, receiver: Receiver) -> None:
    """The receiver has the third entry, and the gateway that sent it never hears so: who leads next sends it again,
    under the same id, and goes on with those that nobody had sent."""
    (tmp_path / "hook.key").write_text(f"{SECRET}\n")
    (tmp_path / "hook.key").chmod(0o600)
    hook = ("--webhook", receiver.url, "--webhook-key-file", str(tmp_path / "hook.key"))
    with gateway_process(tmp_path, *hook) as leader:
        first = leader.process
        wait_until(lambda: delivers(tmp_path), process=first)
        make_keys(leader.admin_url, "one")
        wait_until(lambda: receiver.numbers == [1])
        with gateway_process(tmp_path, *hook) as second:

            def die(taken: int) -> None:
                if taken == 3:
                    first.kill()
                    first.wait()

            receiver.before_answer = die
            make_keys(second.admin_url, "two", "three", "four", "five")
            wait_until(
                lambda: set(receiver.numbers) == {1, 2, 3, 4, 5}, 60.0, lambda: str(receiver.numbers), second.process
            )
            assert first.returncode == -signal.SIGKILL
    assert receiver.numbers == [1, 2, 3, 3, 4, 5]
    ids = [headers["webhook-id"] for headers, _ in receiver.taken]
    assert ids[2] == ids[3]
    assert len(set(ids)) == 5


def test_the_signature_is_the_one_of_the_reference() -> None:
    """The vector that the libraries of Standard Webhooks are tested with."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = ledger.signed("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}', [secret])
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    with pytest.raises(ConfigError, match="--webhook-key-file"):
        WebhookSettings(("https://host/hook",))
    for url in ("ftp://host/hook", "host", "https://"):
        with pytest.raises(ConfigError, match="http:// or https://"):
            WebhookSettings((url,), key)
    for text, problem in (("", "holds no secret"), ("secret\n", "whsec_"), ("whsec_YWJj\n", "24 to 64 bytes")):
        key.write_text(text)
        key.chmod(0o600)
        with pytest.raises(ConfigError, match=problem):
            ledger.read_secrets(key)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="Others can read"):
        ledger.read_secrets(key)
