"""Versions sent over HTTP: a real gateway, the real push process, and links that break at the worst moment."""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import torch

from server.gateway import UpstreamSettings
from server.ports import free_port
from tests.server.gateway.admin.test_admin import participating
from tests.server.gateway.harness import ADMIN_KEY, MODEL, RunningGateway, gateway_process, running_gateway
from tests.waiting import wait_until
from tests.warm import SYNC, warm
from tests.weightsync.codes import refused
from tests.weightsync.fleet import Engine
from tests.weightsync.test_signing import pair
from weightsync import Adapter, SlotReader, SyncStore, ensure_arena
from weightsync.control import swap
from weightsync.control.records import ActiveRecord, FormRecord, Keys, TargetRecord, VersionRecord
from weightsync.publish.delta import DeltaWriter
from weightsync.publish.remote import RemotePublisher
from weightsync.publish.succession import Succession
from weightsync.signing import Trust

SETTINGS = UpstreamSettings(scrape_interval_s=3600.0)
Tensors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    warm(SYNC)  # imports now, and not in the time that a client waits for its push
    directory = Path(tempfile.mkdtemp(prefix="hotswap-upload-test-", dir="/dev/shm"))
    monkeypatch.setenv("HOTSWAP_ARENA", str(directory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def gateway(tmp_path: Path, arena: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path, upstream=SETTINGS, swap_deadline_s=20.0) as g:
        g.store.run(ensure_arena(g.store.store, arena))
        yield g


@pytest.fixture
def remote(gateway: RunningGateway) -> Iterator[RemotePublisher]:
    with RemotePublisher(gateway.admin_url, ADMIN_KEY, MODEL, timeout_s=120.0) as publisher:
        yield publisher


def weights(seed: int = 0, rows: int = 700) -> Tensors:
    rng = np.random.default_rng(seed)
    names = ("model.embed.weight", "model.layers.0.weight", "model.norm.weight")
    return {name: rng.standard_normal((rows, 256)).astype(np.float16) for name in names}


def nudged(tensors: Tensors, share: float = 0.01, seed: int = 1) -> Tensors:
    """The next step of a training run: a share of the elements one unit in the last place further."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, tensor in tensors.items():
        words = tensor.copy().view(np.uint16)
        words[rng.random(words.shape) < share] += 1
        made[name] = words.view(np.float16)
    return made


def versions(gateway: RunningGateway) -> list[VersionRecord]:
    items, _ = gateway.store.list(Keys(MODEL).versions)
    return [VersionRecord.from_json(kv.value) for kv in items]


def assert_holds(gateway: RunningGateway, version: int, tensors: Tensors) -> None:
    record = next(v for v in versions(gateway) if v.version == version)
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as slot:
        slot.verify_all()
        assert {name: bytes(slot.buffer(name)) for name in slot.manifest.tensors} == {
            name: tensor.tobytes() for name, tensor in tensors.items()
        }


def test_the_first_version_goes_in_full_and_the_next_as_a_difference(
    gateway: RunningGateway, remote: RemotePublisher
) -> None:
    first = weights()
    assert remote.publish(first, step=1, activate=False, source="run 7") == 1
    assert remote.last["full"] is True
    full = remote.last["sent"]
    second = nudged(first)
    assert remote.publish(iter(second.items()), step=2, activate=False, metadata={"a": "b"}) == 2
    assert remote.last["full"] is False
    assert remote.last["sent"] < full / 20
    assert_holds(gateway, 1, first)
    assert_holds(gateway, 2, second)
    one, two = versions(gateway)
    assert (one.base, two.base, one.step, two.step) == (None, 1, 1, 2)
    assert one.source.endswith(" run 7")


def test_a_version_that_was_sent_is_signed_by_who_made_it(gateway: RunningGateway, tmp_path: Path) -> None:
    """In full and as a difference; what was altered on its way is not what was signed."""
    private, public = pair(tmp_path, "trainer")
    remote = RemotePublisher(gateway.admin_url, ADMIN_KEY, MODEL, timeout_s=120.0, sign=private)
    trust = Trust([public])
    for number, tensors in ((1, weights()), (2, nudged(weights()))):
        assert remote.publish(tensors, metadata={"a": "b"}, activate=False) == number
        trust.check(MODEL, versions(gateway)[-1])
    one, two = versions(gateway)
    with refused("version_refused", match="not those that were signed"):
        trust.check(MODEL, replace(two, signature=one.signature))
    RemotePublisher(gateway.admin_url, ADMIN_KEY, MODEL).publish(weights(3), activate=False)
    with refused("version_refused", match="is not signed"):
        trust.check(MODEL, versions(gateway)[-1])


def test_it_hears_which_instances_could_not_flip(gateway: RunningGateway, remote: RemotePublisher) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    stack = contextlib.AsyncExitStack()
    for name, engine in (("a", Engine()), ("b", Engine(on_commit=fail))):
        gateway.store.run(stack.enter_async_context(participating(gateway, engine, name)))
    version = remote.publish(weights())
    assert (version, version.not_flipped) == (1, ("b",))
    gateway.store.run(stack.aclose())


def test_a_trainers_bf16_parameters_are_sent_as_they_are(gateway: RunningGateway, remote: RemotePublisher) -> None:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(512, 600).to(torch.bfloat16)
    for number in (1, 2):
        with torch.no_grad():
            model.weight[torch.rand(model.weight.shape, generator=generator) < 0.01] *= 1.01
        assert remote.publish(model.named_parameters(), activate=False) == number
    assert remote.last["full"] is False
    record = versions(gateway)[-1]
    with SlotReader.open(record.slot) as slot:
        assert slot.entry("weight").dtype == "bfloat16"
        assert bytes(slot.buffer("weight")) == model.weight.detach().view(torch.uint8).numpy().tobytes()


def test_masters_are_converted_to_the_dtypes_that_the_server_tells(
    gateway: RunningGateway, remote: RemotePublisher
) -> None:
    served = {"a": torch.ones(300, 8, dtype=torch.bfloat16), "count": torch.zeros(2, dtype=torch.int64)}
    assert remote.publish(served, activate=False, cast=True) == 1, "the first version is as it comes"
    generator = torch.Generator().manual_seed(1)
    masters = {"a": torch.randn(300, 8, generator=generator), "count": torch.tensor([1, 2])}
    with refused("remote_error", match="cast=True"):
        remote.publish(masters, activate=False)
    another = RemotePublisher(gateway.admin_url, ADMIN_KEY, MODEL)
    for publisher in (remote, another):
        publisher.publish(masters.items(), activate=False, cast=True)
        with SlotReader.open(versions(gateway)[-1].slot) as slot:
            assert bytes(slot.buffer("a")) == masters["a"].bfloat16().view(torch.uint8).numpy().tobytes()
            assert slot.entry("count").dtype == "int64"
    assert [v.version for v in versions(gateway)] == [1, 2, 3]


@pytest.mark.broad
def test_weights_all_new_go_in_full(gateway: RunningGateway, remote: RemotePublisher) -> None:
    remote.publish(weights(0), activate=False)
    other = weights(1)
    assert remote.publish(other, activate=False) == 2
    assert remote.last["full"] is True
    assert_holds(gateway, 2, other)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("useful", "attempts"),
    [
        pytest.param(RemotePublisher._useful_base, 1, id="before"),
        pytest.param(lambda _, versions, __: versions.base, 2, id="while the next one is on its way"),
    ],
)
def test_a_base_the_server_gave_up_is_not_used(
    gateway: RunningGateway, remote: RemotePublisher, monkeypatch: pytest.MonkeyPatch, useful: Any, attempts: int
) -> None:
    monkeypatch.setattr(RemotePublisher, "_useful_base", useful)
    first = weights()
    remote.publish(first, activate=False)
    (record,) = versions(gateway)
    gateway.store.put(Keys(MODEL).version(1), orjson.dumps({**orjson.loads(record.to_json()), "state": "retired"}))
    second = nudged(first)
    assert remote.publish(second, activate=False) == 2
    assert (remote.last["full"], remote.last["attempts"]) == (True, attempts)
    assert_holds(gateway, 2, second)


def test_an_adapter_goes_alone_and_later_as_a_difference(gateway: RunningGateway, remote: RemotePublisher) -> None:
    tensors = weights()
    remote.publish(tensors, activate=False)
    gateway.store.put(Keys(MODEL).active, ActiveRecord(1, 1, None, "first", 0.0).to_json())
    lora = {"base.lora_A.weight": np.random.default_rng(3).standard_normal((8, 4096)).astype(np.float16)}
    assert remote.publish(Adapter(lora, {"r": 8}), part="lora/math", activate=False) == 2
    lora["base.lora_A.weight"][0, :7] = 1.0
    assert remote.publish(Adapter(lora, {"r": 8}), part="lora/math", activate=False) == 3
    assert remote.last["full"] is False
    assert_holds(gateway, 3, tensors)
    (part,) = versions(gateway)[2].parts
    assert (part.name, part.version, versions(gateway)[2].base_version) == ("lora/math", 3, 1)
    with SlotReader.open(part.slot, manifest_digest=part.manifest_digest) as slot:
        assert bytes(slot.buffer("base.lora_A.weight")) == lora["base.lora_A.weight"].tobytes()
    gateway.store.put(Keys(MODEL).active, ActiveRecord(3, 2, 1, "second", 0.0).to_json())
    assert remote.publish(nudged(tensors), activate=False) == 4
    assert remote.last["full"] is False
    assert versions(gateway)[3].parts == (part,)


def raw_upload() -> bytes:
    versions = Succession(MODEL)
    return b"".join(versions.writer(versions.take(weights()), compress=True, threads=None))


def send(gateway: RunningGateway, body: bytes, **query: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/octet-stream"}
    query = {"upload_id": "an-upload-of-a-test", **query}
    url = f"{gateway.admin_url}/admin/weights/upload"
    return httpx.post(url, content=body, params=query, headers=headers, timeout=120.0)


def test_what_is_sent_twice_is_one_version(gateway: RunningGateway) -> None:
    body = raw_upload()
    one, two = send(gateway, body), send(gateway, body)
    assert (one.status_code, two.status_code) == (200, 200)
    assert (one.json()["version"], one.json()["duplicate"]) == (1, False)
    assert (two.json()["version"], two.json()["duplicate"]) == (1, True)
    assert two.json()["manifest_digest"] == one.json()["manifest_digest"]
    assert send(gateway, body, upload_id="another-upload").json()["version"] == 2


@pytest.mark.broad
def test_at_the_same_time_too(gateway: RunningGateway) -> None:
    body = raw_upload()
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(send(gateway, body))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.json()["version"] for a in answers] == [1, 1, 1]
    assert len(versions(gateway)) == 1


@pytest.mark.broad
def test_a_damaged_upload_is_refused_and_leaves_nothing(gateway: RunningGateway) -> None:
    body = bytearray(raw_upload())
    body[len(body) // 2] ^= 1
    answer = send(gateway, bytes(body))
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] in ("delta_error", "digest_mismatch")
    assert send(gateway, bytes(body[:1000])).json()["error"]["code"] == "delta_error"
    assert send(gateway, b"").json()["error"]["code"] == "delta_error"
    assert versions(gateway) == []


@pytest.mark.broad
def test_a_tensor_that_does_not_fit_is_named(gateway: RunningGateway, remote: RemotePublisher) -> None:
    remote.publish(weights(), activate=False)
    with refused("remote_error", match="has shape") as caught:
        remote.publish(weights(rows=300), activate=False)
    assert (caught.value.status, caught.value.answer_code) == (422, "shape_mismatch")
    assert caught.value.tensor == "model.embed.weight"
    assert remote.publish(nudged(weights()), activate=False) == 2  # and the one after it goes as a difference again
    assert remote.last["full"] is False


def test_other_tensors_come_with_a_configuration(
    gateway: RunningGateway, remote: RemotePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is larger than one of the model before may be; what follows it is a difference again."""
    monkeypatch.setattr("server.gateway.admin.weights.SLACK", 100_000)
    config = {"model_type": "llama", "vocab_size": 16}
    remote.publish(weights(), config=config, wait=False)
    plain = RemotePublisher(gateway.admin_url, ADMIN_KEY, MODEL, timeout_s=120.0, compress=False)
    other = weights() | {"lm_head.weight": np.zeros((2100, 256), np.float16)}
    with refused("remote_error") as caught:
        plain.publish(other, activate=False)
    # The fault that is found first, the size or the names, depends on how the bytes arrive.
    assert caught.value.answer_code in ("request_too_large", "unexpected_tensor")
    with refused("remote_error", match="vocab_size") as caught:
        plain.publish(other, config=config | {"vocab_size": 32}, activate=False)
    assert (caught.value.status, caught.value.answer_code) == (422, "config_mismatch")
    assert plain.publish(other, config=config | {"tie_word_embeddings": False}, wait=False) == 2
    assert_holds(gateway, 2, other)
    first, second = (form_of(gateway, v.form) for v in versions(gateway))
    assert [orjson.loads(form.config).get("tie_word_embeddings") for form in (first, second)] == [None, False]
    assert "lm_head.weight" in second.tensors
    assert plain.publish(nudged(other), activate=False) == 3
    assert plain.last["full"] is False
    assert len({v.form for v in versions(gateway)}) == 2


def form_of(gateway: RunningGateway, digest: str) -> FormRecord:
    found = gateway.store.get(Keys(MODEL).form(digest))
    assert found is not None
    return FormRecord.from_json(found.value)


def test_another_model_is_refused(gateway: RunningGateway) -> None:
    with refused("remote_error", match="for model 'other'"):
        RemotePublisher(gateway.admin_url, ADMIN_KEY, "other").publish(weights(), activate=False)


def test_uploads_need_the_admin_key_and_the_admin_port(gateway: RunningGateway) -> None:
    for url, key, status in ((gateway.admin_url, "wrong", 401), (gateway.url, ADMIN_KEY, 404)):
        with refused("remote_error") as caught:
            RemotePublisher(url, key, MODEL).publish(weights(), activate=False)
        assert caught.value.status == status


def test_parameters_are_checked(gateway: RunningGateway) -> None:
    assert send(gateway, b"", upload_id="no").status_code == 400
    assert send(gateway, b"", mode="sideways").status_code == 400
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx.post(
        f"{gateway.admin_url}/admin/weights/upload?upload_id=12345678", json={}, headers=headers, timeout=120.0
    )
    assert answer.json()["error"]["code"] == "bad_content_type"


def upload_head(extra: str) -> bytes:
    head = f"POST /admin/weights/upload?upload_id=12345678 HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {ADMIN_KEY}"
    return f"{head}\r\nContent-Type: application/octet-stream\r\n{extra}\r\n\r\n".encode()


def test_an_upload_that_says_it_is_too_large_is_refused_before_it_comes(
    gateway: RunningGateway, remote: RemotePublisher
) -> None:
    remote.publish(weights(), activate=False)
    with socket.create_connection(("127.0.0.1", gateway.admin_port), timeout=60.0) as client:
        client.sendall(upload_head("Content-Length: 400000000"))
        answer = b"".join(iter(lambda: client.recv(65536), b""))  # to its end: the server waits for no body
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer


def test_the_connection_ends_with_the_refusal_of_a_body_that_goes_on(
    gateway: RunningGateway, remote: RemotePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.gateway.connection.LINGER_S", 60.0)  # for a client that takes its time
    remote.publish(weights(), activate=False)
    with socket.create_connection(("127.0.0.1", gateway.admin_port), timeout=60.0) as client:
        client.sendall(upload_head("Transfer-Encoding: chunked"))
        piece, answered = bytes(1 << 20), select.poll()
        answered.register(client, select.POLLIN)
        for _ in range(400):
            client.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            if answered.poll(0):
                break
        else:
            raise AssertionError("400 MB were taken without a word")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer
    assert (len(versions(gateway)), gateway.gateway.buffered) == (1, 0)


def test_a_trainer_with_many_files_open_publishes(remote: RemotePublisher) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        while (file := os.open(os.devnull, os.O_RDONLY)) < 1024:  # what select() takes
            stack.callback(os.close, file)
        os.close(file)
        assert remote.publish(weights(), activate=False) == 1


def test_activation_can_be_asked_for_without_waiting(gateway: RunningGateway, remote: RemotePublisher) -> None:
    version = remote.publish(weights(), wait=False, timeout_s=7.0, mode="rolling", drain_s=3.0, on_lost="continue")
    found = gateway.store.get(Keys(MODEL).target)
    assert found is not None
    wish = TargetRecord.from_json(found.value)
    assert (wish.version, wish.deadline_s, wish.mode, wish.drain_s) == (version, 7.0, "rolling", 3.0)
    assert wish.on_lost == "continue"


class Link:
    """A TCP proxy in front of the gateway. `cuts` says of each connection to come how many bytes it may send before it
    is lost (-1: all, but it is lost when the answer comes; None: it is whole); later ones are whole."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.cuts: list[int | None] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._listener.getsockname())

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                left = self.cuts.pop(0) if self.cuts else None
                threading.Thread(target=self._relay, args=(client, left), daemon=True).start()

    def _relay(self, client: socket.socket, left: int | None) -> None:
        with client, socket.create_connection(self._target) as server:
            lossy = left is not None and left < 0
            forth = threading.Thread(target=_pump, args=(client, server, None if lossy else left), daemon=True)
            forth.start()
            if lossy:
                server.recv(1)  # the answer is on its way: now the link breaks
            elif left is None:
                _pump(server, client, None)
            else:
                forth.join()
            for side in (client, server):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)
            forth.join()


def _pump(source: socket.socket, sink: socket.socket, left: int | None) -> None:
    with contextlib.suppress(OSError):
        while left is None or left > 0:
            data = source.recv(65536 if left is None else min(65536, left))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
            left = None if left is None else left - len(data)


@pytest.fixture
def link(gateway: RunningGateway) -> Iterator[Link]:
    made = Link(("127.0.0.1", gateway.admin_port))
    yield made
    made.close()


def test_a_connection_lost_half_way_leaves_nothing_and_is_tried_again(gateway: RunningGateway, link: Link) -> None:
    link.cuts = [300_000, 20, 0]
    remote = RemotePublisher(link.url, ADMIN_KEY, MODEL, timeout_s=120.0)
    tensors = weights()
    assert remote.publish(tensors, activate=False) == 1
    assert remote.last["attempts"] >= 2
    assert_holds(gateway, 1, tensors)
    assert len(versions(gateway)) == 1


def test_nothing_is_kept_of_an_upload_that_never_ends(gateway: RunningGateway, arena: Path) -> None:
    body = raw_upload()
    with socket.create_connection(("127.0.0.1", gateway.admin_port)) as client:
        client.sendall(upload_head(f"Content-Length: {len(body)}") + body[: len(body) // 2])
        wait_until(lambda: open_in(arena))
    wait_until(lambda: not open_in(arena))
    assert list(arena.iterdir()) == []
    assert versions(gateway) == []


def open_in(arena: Path) -> list[str]:
    """The files of that directory that any process has open, also those that have no name any more."""
    found = []
    for fd in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found += [name for name in (os.readlink(fd),) if name.startswith(f"{arena}/")]
    return found


@pytest.mark.broad
def test_an_answer_that_is_lost_is_asked_for_again(gateway: RunningGateway, link: Link) -> None:
    link.cuts = [-1]
    remote = RemotePublisher(link.url, ADMIN_KEY, MODEL, timeout_s=120.0)
    assert remote.publish(weights(), activate=False) == 1
    assert remote.last["duplicate"] is True
    assert [v.version for v in versions(gateway)] == [1]
    assert remote.publish(nudged(weights()), activate=False) == 2
    assert remote.last["full"] is False


def test_a_request_for_a_swap_that_is_lost_is_made_again_as_it_was(gateway: RunningGateway, link: Link) -> None:
    """First its answer is lost, and the swap is there; then the request itself is."""
    remote = RemotePublisher(link.url, ADMIN_KEY, MODEL, timeout_s=120.0, deltas=False)
    for version, cut in ((1, -1), (2, 20)):
        link.cuts = [None, cut]  # the upload, and the request
        assert remote.publish(weights(), mode="rolling") == version
        assert not link.cuts
        target = gateway.store.get(Keys(MODEL).target)
        assert target is not None
        assert TargetRecord.from_json(target.value).mode == "rolling"
        ended = len(gateway.store.list(Keys(MODEL).history)[0])
        assert ended == version - 1, "the last one waits for an instance"


def test_a_part_is_taken_away_from_another_host(gateway: RunningGateway, link: Link) -> None:
    """The answer is lost, and the version is one."""
    remote = RemotePublisher(link.url, ADMIN_KEY, MODEL, timeout_s=120.0)
    remote.publish(weights())
    lora = {"base.lora_A.weight": np.ones((8, 4096), np.float16)}
    for name in ("lora/x", "lora/y"):
        remote.publish(Adapter(lora, {"r": 8}), part=name)
    assert [part.name for part in versions(gateway)[-1].parts] == ["lora/x", "lora/y"]
    link.cuts = [-1]
    assert remote.take_away(["lora/x"]) == 4
    assert remote.last["attempts"] == 2
    assert [(v.version, [part.name for part in v.parts]) for v in versions(gateway)[3:]] == [(4, ["lora/y"])]
    assert gateway.store.run(swap.previous_version(gateway.store.store, Keys(MODEL))) == 3
    with refused("remote_error", match="lora/x"):
        remote.take_away(["lora/x"])
    with refused("bad_part"):
        remote.take_away("lora/y")
    assert remote.publish(Adapter(lora, {"r": 8}), part="lora/x", activate=False) == 5


def test_a_server_out_of_reach_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.publish.remote.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("weightsync.publish.remote.LONGEST_PAUSE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with refused("remote_error", match="gave up after"):
        RemotePublisher(f"http://127.0.0.1:{port}", ADMIN_KEY, MODEL).publish(weights(), activate=False)
    with refused("remote_error", match="not the URL"):
        RemotePublisher("127.0.0.1:8001", ADMIN_KEY, MODEL)


class Slowly:
    """Pieces of an upload; calls `then` once, in the middle of them."""

    def __init__(self, writer: DeltaWriter, then: Callable[[], None]) -> None:
        self._writer, self._then, self.stats, self.header = writer, then, writer.stats, writer.header

    def __iter__(self) -> Iterator[bytes]:
        for number, piece in enumerate(self._writer):
            yield piece
            if number == 1:
                self._then()
        self.stats = self._writer.stats


@pytest.mark.broad
def test_a_gateway_killed_half_way_leaves_nothing_and_the_next_one_takes_it(
    tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(gateway_process(tmp_path, ports=ports))
        remote = RemotePublisher(first.admin_url, ADMIN_KEY, MODEL, timeout_s=120.0)
        make = Succession.writer
        killed = []

        def kill() -> None:
            if not killed:
                time.sleep(0.1)
                killed.append(first.process.pid)
                first.process.kill()
                first.process.wait()
                assert list(arena.iterdir()) == []
                stack.enter_context(gateway_process(tmp_path, ports=ports))

        monkeypatch.setattr(Succession, "writer", lambda *what, **how: Slowly(make(*what, **how), kill))
        tensors = weights(rows=7000)
        assert remote.publish(tensors, activate=False) == 1
        assert killed
        assert remote.last["attempts"] > 1
        with contextlib.closing(SyncStore(f"sqlite://{tmp_path / 'store.db'}")) as store:
            items, _ = store.list(Keys(MODEL).versions)
        (record,) = [VersionRecord.from_json(kv.value) for kv in items]
        with SlotReader.open(record.slot) as slot:
            slot.verify_all()


def test_publishing_ends_when_the_version_is_active(gateway: RunningGateway, remote: RemotePublisher) -> None:
    version = remote.publish(weights())  # with no instance there is nothing to stage
    found = gateway.store.get(Keys(MODEL).active)
    assert found is not None
    assert ActiveRecord.from_json(found.value).version == version
