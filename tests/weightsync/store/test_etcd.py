"""Features of etcd's own: the URL, the namespace, certificates, users, and refusals that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.etcd import Etcd, Tls
from weightsync.errors import StoreRefused, StoreUnavailable
from weightsync.store import MISSING, Store, SyncStore, open_store
from weightsync.store.etcd_url import EtcdUrl


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    try:
        yield store
    finally:
        await store.close()


async def use(url: str) -> bytes | None:
    async with opened(url) as store:
        await store.put("a", b"1")
        found = await store.get("a")
    return found.value if found else None


# the URL


def test_a_url_in_full() -> None:
    url = EtcdUrl.parse("etcd://a,b:1234,[::1]:99/team/models/?ca=/x/ca.pem&user=trainer&password_file=/x/pw")
    assert url.endpoints == (("a", 2379), ("b", 1234), ("[::1]", 99))
    assert url.namespace == "team/models/"
    assert (url.user, url.options["ca"]) == ("trainer", "/x/ca.pem")
    assert EtcdUrl.parse("etcd://a?ca=/c++/my%20ca.pem").options == {"ca": "/c++/my ca.pem"}
    assert EtcdUrl.parse("etcd://a").namespace == "hotswap/"
    assert EtcdUrl.parse("etcd://[::1]").endpoints == (("[::1]", 2379),)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("etcd://", "is not host:port"),
        ("etcd://a:x/n", "'a:x' is not host:port"),
        ("etcd://a:99999", "is not host:port"),
        ("etcd://a,,b", "'' is not host:port"),
        ("etcd://::1:99", "is not host:port"),
        ("etcd://a?pasword_file=/x", "unknown option 'pasword_file'"),
        ("etcd://a?user=x&user=y", "given twice"),
        ("etcd://a?ca=/x&cert=/y", "incomplete TLS options"),
        ("etcd://a?cert=/x&key=/y", "incomplete TLS options"),
        ("etcd://a?ca=/no/such/ca.pem", "cannot read /no/such/ca.pem"),
        ("etcd://a?user=x", "no password for user 'x'"),
        ("etcd://a?user=x&password_file=/no/such", "cannot read /no/such"),
        ("etcd://root:hush@a/n", "password_file"),
        ("etcd://root:hush@b,c", "password_file"),
        ("etcd://a/n?password=hush", "password_file"),
    ],
)
def test_urls_that_cannot_be_opened(url: str, problem: str) -> None:
    """A password in one is not repeated."""
    with pytest.raises(StoreUnavailable) as refused:
        open_store(url)
    assert problem in str(refused.value)
    assert "hush" not in str(refused.value)
    assert refused.value.advice


def test_nobody_listens() -> None:
    with pytest.raises(StoreUnavailable, match="Start etcd there"):
        open_store("etcd://127.0.0.1:1/n", create=False)


# keys


async def test_namespaces_do_not_see_each_other(etcd: Etcd) -> None:
    async with opened(etcd.url("one")) as one, opened(etcd.url("one-more")) as more, opened(etcd.url()) as default:
        revision = await one.put("a", b"1")
        assert await more.get("a") is None
        assert (await more.list(""))[0] == []
        await default.compare_and_swap("a", MISSING, b"2")
        assert [kv.key for kv in (await one.list(""))[0]] == ["a"]
        assert (await one.get("a")).mod_revision == revision  # type: ignore[union-attr]
        await one.delete("a")
        await default.delete("a")


async def test_several_stores_in_one_process(etcd: Etcd) -> None:
    """One on the loop of the test, one on a thread of its own, each with a watch."""
    async with opened(etcd.url("shared")) as store:
        _, revision = await store.list("")
        blocking = await asyncio.to_thread(SyncStore, etcd.url("shared"))
        events = store.watch("", revision + 1)
        for i in range(50):
            await asyncio.to_thread(blocking.put, "a", b"%d" % i)
            assert (await anext(events)).kv.value == b"%d" % i
        await asyncio.to_thread(blocking.close)
        await store.delete("a")


async def test_what_is_too_much_for_etcd_is_refused(etcd: Etcd) -> None:
    async with opened(etcd.url("limits")) as store:
        with pytest.raises(StoreRefused, match="max-txn-ops"):
            await store.txn({}, {f"k{i}": b"" for i in range(129)})
        with pytest.raises(StoreRefused, match="max-request-bytes"):
            await store.put("a", bytes(2_000_000))
        assert (await store.list(""))[0] == []


async def test_a_list_larger_than_a_grpc_message(etcd: Etcd) -> None:
    async with opened(etcd.url("large")) as store:
        _, revision = await store.list("")
        for i in range(6):
            await store.put(f"k{i}", bytes(1_000_000))
        assert sum(len(kv.value) for kv in (await store.list(""))[0]) == 6_000_000
        events = store.watch("", revision + 1)
        assert [(await anext(events)).kv.key for _ in range(6)] == [f"k{i}" for i in range(6)]
        await store.txn({}, {f"k{i}": None for i in range(6)})


# certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tls, Tls]:
    """An authority, and one that has nothing to do with it."""
    root = tmp_path_factory.mktemp("certificates")
    return Tls(root / "ours", client_certificates=True), Tls(root / "other")


@pytest.fixture(scope="module")
def secured(certificates: tuple[Tls, Tls]) -> Iterator[Etcd]:
    """An etcd that speaks TLS only, with clients that show a certificate only."""
    server = Etcd(tls=certificates[0])
    yield server
    server.close()


async def test_certificates_of_both_sides(secured: Etcd, certificates: tuple[Tls, Tls]) -> None:
    ours, _ = certificates
    url = secured.url("n", ca=ours.ca, cert=ours.cert, key=ours.key)
    assert await use(url) == b"1"
    async with opened(url) as store:
        assert store.url == url


@pytest.mark.parametrize(
    ("options", "kind", "advice"),
    [
        (lambda ours, other: {}, StoreUnavailable, "If it speaks TLS, add"),
        (lambda ours, other: {"ca": other.ca, "cert": ours.cert, "key": ours.key}, StoreRefused, "Pass as ca="),
        (lambda ours, other: {"ca": ours.ca}, StoreRefused, "&cert=/path&key=/path"),
        (lambda ours, other: {"ca": ours.ca, "cert": other.cert, "key": other.key}, StoreRefused, "that it trusts"),
        (lambda ours, other: {"ca": ours.ca, "cert": ours.key, "key": ours.key}, StoreRefused, "are PEM"),
    ],
    ids=["no TLS", "wrong authority", "no client certificate", "wrong client certificate", "not a certificate"],
)
async def test_wrong_certificates(
    secured: Etcd,
    certificates: tuple[Tls, Tls],
    options: Callable[[Tls, Tls], dict[str, object]],
    kind: type[StoreUnavailable],
    advice: str,
) -> None:
    with pytest.raises(kind, match=advice) as refused:
        await use(secured.url("n", **options(*certificates)))
    assert type(refused.value) is kind


async def test_a_reset_that_overtakes_the_refusal_of_a_certificate(certificates: tuple[Tls, Tls]) -> None:
    """TLS 1.3 refuses a client after the handshake. The first connection ends with a reset in place of the reason."""
    ours, other = certificates

    def refuse(listener: socket.socket) -> None:
        for required in (ssl.CERT_NONE, ssl.CERT_NONE, *[ssl.CERT_REQUIRED] * 9):  # the first looks for a listener
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ours.ca)
            context.load_cert_chain(ours.server_cert, ours.server_key)
            context.set_alpn_protocols(["h2"])
            context.verify_mode = required
            with contextlib.suppress(OSError), listener.accept()[0] as connection, connection.dup() as raw:
                try:
                    with context.wrap_socket(connection, server_side=True):
                        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                except ssl.SSLCertVerificationError:
                    while raw.recv(4096):  # unread bytes would make a reset of the end
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=(listener,))
        thread.start()
        try:
            url = f"etcd://127.0.0.1:{listener.getsockname()[1]}/n?ca={ours.ca}&cert={other.cert}&key={other.key}"
            with pytest.raises(StoreRefused, match="that it trusts"):
                await use(url)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


async def test_a_name_that_is_not_in_the_certificate(secured: Etcd, certificates: tuple[Tls, Tls]) -> None:
    ours, _ = certificates
    url = secured.url("n", ca=ours.ca, cert=ours.cert, key=ours.key).replace("127.0.0.1", "localhost")
    with pytest.raises(StoreRefused, match="under a name that is in its certificate"):
        await use(url)


async def test_tls_where_there_is_none(etcd: Etcd, certificates: tuple[Tls, Tls]) -> None:
    with pytest.raises(StoreUnavailable, match="leave ca= out"):
        await use(etcd.url("n", ca=certificates[0].ca))


# users


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Etcd, Path]]:
    """An etcd with users: alice, whose password is in the file, may use `alice/` only."""
    password_file = tmp_path_factory.mktemp("secrets") / "password"
    server = Etcd()
    server.require_users(root="root", alice="hush")
    password_file.write_text("hush\n")
    yield server, password_file
    server.close()


async def test_a_user(guarded: tuple[Etcd, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The URL names the file of the password, or the environment does."""
    server, password_file = guarded
    async with opened(server.url("alice", user="alice", password_file=password_file)) as store:
        await store.put("b", b"1")
        assert await anext(store.watch("b", 1))
        assert "hush" not in store.url
        assert await use(store.url) == b"1"
    monkeypatch.setenv("HOTSWAP_ETCD_PASSWORD_FILE", str(password_file))
    assert await use(server.url("alice", user="alice")) == b"1"


@pytest.mark.parametrize(
    ("namespace", "options", "advice"),
    [
        ("alice", {}, "add \\?user=NAME"),
        ("bob", {"user": "alice"}, "read and write on the prefix 'bob/'"),
        ("alice", {"user": "bob"}, "Check user= in the URL"),
    ],
    ids=["no user", "another prefix", "unknown user"],
)
async def test_users_that_are_refused(
    guarded: tuple[Etcd, Path], namespace: str, options: dict[str, object], advice: str
) -> None:
    server, password_file = guarded
    url = server.url(namespace, **options | ({"password_file": password_file} if options else {}))
    with pytest.raises(StoreRefused, match=advice) as refused:
        await use(url)
    assert "hush" not in str(refused.value)
    async with opened(url) as store:
        with pytest.raises(StoreRefused, match=advice):
            await anext(store.watch(""))


async def test_a_wrong_password(guarded: tuple[Etcd, Path], tmp_path: Path) -> None:
    (tmp_path / "password").write_text("guess")
    with pytest.raises(StoreRefused, match="the password in its file") as refused:
        await use(guarded[0].url("alice", user="alice", password_file=tmp_path / "password"))
    assert "guess" not in str(refused.value)


async def test_a_user_where_there_are_none(etcd: Etcd, guarded: tuple[Etcd, Path]) -> None:
    with pytest.raises(StoreRefused, match="Leave user= out"):
        await use(etcd.url("n", user="alice", password_file=guarded[1]))


async def test_a_token_that_ended_is_renewed(guarded: tuple[Etcd, Path], tmp_path: Path) -> None:
    server, password_file = guarded
    own = tmp_path / "password"
    own.write_text(password_file.read_text())
    async with opened(server.url("alice", user="alice", password_file=own)) as store:
        revision = await store.put("c", b"1")
        server.change_password("alice", "another")  # which ends the tokens of alice
        with pytest.raises(StoreRefused, match="Check user="):
            await store.put("c", b"2")
        own.write_text("another")
        assert await store.put("c", b"3") == revision + 1
        server.change_password("alice", "hush")
        own.write_text("hush")
        assert (await anext(store.watch("c", revision))).kv.value == b"1"


# processes


def in_a_fork(store: Store) -> str:
    """The message that a forked child hears from the store of its parent."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            asyncio.run(store.get("a"))
        except BaseException as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


def test_a_forked_child_is_refused_and_its_parent_goes_on(etcd: Etcd) -> None:
    store = SyncStore(etcd.url("forked"))
    revision = store.put("a", b"1")
    assert "Open it after the fork" in in_a_fork(store.store)
    assert store.put("a", b"2") == revision + 1
    store.delete("a")
    store.close()


FORKS = """
import hashlib, multiprocessing, sys, threading
from weightsync import SyncStore

def child():
    thread = threading.Thread(target=lambda: hashlib.sha256(bytes(1_000_000)).digest())
    thread.start()
    thread.join()

store, done, writes = SyncStore(sys.argv[1]), threading.Event(), 0

def write():
    global writes
    while not done.is_set():
        store.put("a", b"1")
        writes += 1

writer = threading.Thread(target=write)
writer.start()
context = multiprocessing.get_context("fork")
ends = []
for _ in range(60):
    process = context.Process(target=child)
    process.start()
    process.join()
    ends.append(process.exitcode)
before = writes
while writes < before + 10:
    pass
done.set()
writer.join()
store.close()
assert ends == [0] * 60, ends
"""


def test_children_forked_while_it_writes_come_to_no_harm(etcd: Etcd) -> None:
    """As checkpoints are written in the background of a training step. In a process of its own: gRPC starts once."""
    subprocess.run([sys.executable, "-c", FORKS, etcd.url("forks")], check=True, timeout=280)


@pytest.mark.broad
def test_it_lives_beside_vllm() -> None:
    """Their protobuf messages share one registry; a clash would show at import."""
    code = "import vllm.sampling_params, opentelemetry.exporter.otlp.proto.grpc, weightsync.store.etcd"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
