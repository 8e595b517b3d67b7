"""Cores, ids and ports that `hotswap up` gives each process; and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weightsync
from server.cli.admin import AdminClient
from server.errors import CliError
from server.gpus import DEVICES_ENV
from server.ports import free_port, url_of
from server.up import interrupts
from server.up import server as up
from server.up.config import UpConfig
from server.up.paths import ServerInfo
from server.up.processes import BIND_ENV, THREADS_ENV, cause_in, share_of_cores
from server.up.processes import Child as RealChild
from server.up.served import draft_dir, served
from server.up.server import Server
from tests.cluster_tls import Authority
from tests.server.gateway.harness import ADMIN_KEY, running_gateway
from tests.server.nvml import seven
from tests.server.up.restarts import Answers, Child, save_checkpoint
from tests.weightsync.tensors import model as model_of
from trainer.config import FaultsConfig
from weightsync import Publisher, SyncStore, ensure_arena, open_store
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys
from weightsync.vllm_engine.gpus import Gpus

STARTS = ("server.gateway", "server.cli instance", "weightsync.push")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", 1.0)


@pytest.mark.parametrize(
    ("index", "instances", "args", "env", "bind", "threads"),
    [
        (0, 1, (), {}, None, None),
        (0, 2, (), {}, "0,1,2,3", "4"),
        (1, 2, (), {}, "4,5,6,7", "4"),
        (2, 3, (), {}, "5,6,7", "3"),
        (1, 2, (), {"OMP_NUM_THREADS": "1"}, "4,5,6,7", "1"),
        (1, 2, (), {"VLLM_CPU_OMP_THREADS_BIND": "auto"}, None, None),
        (1, 2, ("--tensor-parallel-size", "2"), {}, "4,5|6,7", "2"),
        (0, 2, ("--tensor-parallel-size=4",), {}, "0|1|2|3", "1"),
        (0, 8, ("-tp", "2"), {}, "0|0", "1"),
        (9, 16, (), {}, "1", "1"),
        (0, 2, ("--tensor-parallel-size", "auto"), {}, "0,1,2,3", "4"),
    ],
)
def test_share_of_cores(
    monkeypatch: pytest.MonkeyPatch, index: int, instances: int, args: tuple[str, ...], env: Mapping[str, str],
    bind: str | None, threads: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    got = share_of_cores(index, instances, args, env)
    assert (got.get("VLLM_CPU_OMP_THREADS_BIND"), got.get("OMP_NUM_THREADS")) == (bind, threads)


def test_all_cores_are_shared_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6, 7, 11, 12, 13})
    parts = [share_of_cores(i, 3, (), {})["VLLM_CPU_OMP_THREADS_BIND"] for i in range(3)]
    assert ",".join(parts) == "3,5,6,7,11,12,13"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": None}, "--models"),
        ({"instances": 0}, "--instances"),
        ({"kv_cache_gib": 0.0}, "--kv-cache-gib"),
        ({"ready_timeout_s": 0.0}, "--ready-timeout"),
        ({"store": "sqlite:///x.db"}, "--store"),
        ({"store": "http://x"}, "--store"),
        ({"store": "etcd://h:1", "fresh": True}, "--fresh"),
        ({"ray": "auto"}, "etcd"),
        ({"ray": "auto", "store": "etcd://h", "ray_bundle": "CPU"}, "CPU=8,GPU=2"),
        ({"ray": "auto", "store": "etcd://h", "ray_bundle": "CPU=0"}, "above 0"),
        ({"ray": "auto", "store": "etcd://h", "vllm_args": ("--nnodes=2",)}, "one node"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CliError, match=said):
        UpConfig(**{"model": "m", **settings})


def test_every_instance_has_its_own_name(model: Path, tmp_path: Path) -> None:
    alone = Server(UpConfig(model=str(model), state_dir=tmp_path, instances=2))
    assert [alone.instance_id(i) for i in range(2)] == ["instance-0", "instance-1"]
    shared = Server(UpConfig(model=str(model), state_dir=tmp_path, port=8000, store="etcd://127.0.0.1:2379"))
    assert shared.instance_id(1) == f"{socket.gethostname()}-8000-instance-1"
    assert shared.store == "etcd://127.0.0.1:2379"


def test_the_admin_port_is_the_next_one_if_no_process_has_it(model: Path, tmp_path: Path) -> None:
    for _ in range(50):  # until no process has the next one
        port = free_port()
        server = Server(UpConfig(model=str(model), state_dir=tmp_path, port=port))
        if server.admin_port == port + 1:
            break
    assert server.admin_port == port + 1
    second = Server(UpConfig(model=str(model), state_dir=tmp_path, port=port))
    assert second.admin_port not in (port, port + 1)  # the first one's gateway may not listen yet
    assert second.admin_url.endswith(f":{second.admin_port}")
    assert Server(UpConfig(model=str(model), state_dir=tmp_path, port=65535)).admin_port < 65535


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
async def test_it_asks_the_gateway_at_the_host_that_it_was_given(host: str, model: Path, tmp_path: Path) -> None:
    with running_gateway(tmp_path, host=host, model=model.name) as gateway:
        server = Server(UpConfig(model=str(model), state_dir=tmp_path, host=host, port=gateway.port))
        server.admin_url = url_of("127.0.0.1", gateway.admin_port)
        server.admin_key_file.write_text(ADMIN_KEY)
        async with gateway.instance(instance_id=server.instance_id(0)):
            await asyncio.to_thread(server.wait_ready, 60)
    assert ServerInfo.read(tmp_path).url == server.url


@pytest.mark.parametrize("admin", [{}, {"admin_host": "127.0.0.2"}], ids=["loopback", "another-address"])
async def test_it_asks_a_gateway_by_the_certificate_that_it_was_given(
    admin: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is for another name than the address that `up` and commands on this host ask. Its file is named
    from where `up` runs, and commands run elsewhere."""
    made = Authority(tmp_path).mount(tmp_path / "tls", name="llm.example.com")
    files = {"ssl_certfile": made / "tls.crt", "ssl_keyfile": made / "tls.key"}
    with running_gateway(tmp_path, model=model.name, **files, **admin) as gateway:
        monkeypatch.chdir(tmp_path)
        words = ("--ssl-certfile", "tls/tls.crt", "--ssl-keyfile", "tls/tls.key")
        words += ("--admin-port", str(gateway.admin_port), "--admin-host", admin.get("admin_host", "127.0.0.1"))
        config = UpConfig(model=str(model), state_dir=tmp_path, port=gateway.port, gateway_args=words)
        server = Server(config)
        server.admin_key_file.write_text(ADMIN_KEY)
        async with gateway.instance(instance_id=server.instance_id(0)):
            await asyncio.to_thread(server.wait_ready, 60)
            monkeypatch.chdir("/")
            rows = await asyncio.to_thread(AdminClient(tmp_path).call, "GET", "/admin/instances")
    assert [row["id"] for row in rows["instances"]] == [server.instance_id(0)]
    assert server.url.startswith("https://127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--hold", "-1"), "--hold -1: must be 0"),
        (("--ssl-certfile", "/nowhere"), "go together"),
        (("--ssl-certfile", "/nowhere", "--ssl-keyfile", "/nowhere"), "--ssl-certfile /nowhere: cannot be used .*PEM"),
        (("--admin-host", "0.0.0.0"), "beyond loopback the admin port needs TLS"),
        (("--admin-host", "0.0.0.0", "--cluster-tls", "/nowhere"), "/nowhere.*there is no tls.crt"),
    ],
)
def test_what_its_gateway_cannot_use_is_refused_before_anything_starts(
    words: tuple[str, ...], says: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(CliError, match=says):
        Server(UpConfig(model=str(model), state_dir=tmp_path / "state", gateway_args=words))
    assert not (tmp_path / "state").exists()


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(up, "Child", Child)
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(tmp_path))
    server = Server(UpConfig(model=str(model), name="toy", state_dir=tmp_path / "state", instances=2, throwaway=True))
    server.arena = tmp_path / "slots"
    yield server
    server.stop()
    assert not server.arena.exists()


@contextlib.contextmanager
def another(server: Server, **settings: Any) -> Iterator[Server]:
    """A server with these settings, started in the memory of `server`."""
    found = Server(replace(server.config, **settings))
    found.arena = server.arena
    try:
        found.start()
        yield found
    finally:
        found.stop()


def test_a_trainer_is_given_the_time_that_it_takes_to_save(server: Server) -> None:
    server.start()
    server.train(Path("run.yaml"))
    server.stop()
    given = {name: child.grace_s for name, child in server.children.items()}  # type: ignore[attr-defined]
    assert given.pop("trainer") > FaultsConfig().grace_s > max(given.values())


def test_what_ends_is_started_again_unless_it_was_just_now(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(up.time, "monotonic", lambda: now)
    server.start()
    assert list(server.children) == ["gateway", "publish", "instance-0", "instance-1"]
    for name in ("publish", "instance-0"):
        server.children[name].alive = False  # type: ignore[misc]
    for _ in range(2):
        server.restart_ended()
        now += up.RESTART_PAUSE_S / 2
    server.children["gateway"].alive = False  # type: ignore[misc]
    server.restart_ended()
    calls = {name: child.calls for name, child in server.children.items()}  # type: ignore[attr-defined]
    assert calls == {"gateway": [], "publish": [], "instance-0": ["stop", "start"], "instance-1": []}
    server.restart_ended()
    assert calls["gateway"] == ["stop", "start"]
    assert capsys.readouterr().err.count("restarting") == 2


@pytest.mark.parametrize(("status", "lives_s", "most"), [(1, 0.0, 70), (1, 20.0, 60), (1, 61.0, 60), (-9, 0.0, 1801)])
def test_what_fails_again_and_again_is_started_ever_less_often(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int, lives_s: float, most: int
) -> None:
    """An hour: of a process that fails by itself, soon or late; and of one that is killed, which does not wait."""
    now = died = 1000.0
    monkeypatch.setattr(up.time, "monotonic", lambda: now)
    server.start()
    child: Any = server.children["instance-0"]
    starts = []

    def start() -> None:
        nonlocal died
        starts.append(now)
        child.alive, died = True, now + lives_s

    child.start = start
    for _ in range(36_000):
        if now >= died:
            child.alive, child.returncode = False, status
        server.restart_ended()
        now += 0.1
    pauses = [b - a - lives_s for a, b in itertools.pairwise(starts)]
    assert most * 0.7 < len(starts) <= most
    assert max(pauses) < up.LONGEST_PAUSE_S + 1 if lives_s < up.STEADY_S and status > 0 else max(pauses) < 2.5


def test_what_ended_is_told_with_its_cause(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer, too, which is left ended; a publication that is through, and a training run, are not told."""
    server.start()
    server.train(Path("run.yaml"))
    for name, status, cause in (("publish", 0, ""), ("instance-0", -9, ""), ("trainer", 1, "ValueError: no data")):
        child: Any = server.children[name]
        child.alive, child.returncode, child.log, child.cause = False, status, tmp_path / "log", lambda c=cause: c
    for _ in range(2):
        server.restart_ended()
    assert capsys.readouterr().err.splitlines() == [
        "hotswap: instance-0 ended with -9; restarting",
        f"hotswap: trainer ended with 1 (ValueError: no data). Its log is {tmp_path / 'log'}",
    ]


def test_the_cause_is_that_of_the_last_run(tmp_path: Path) -> None:
    """The log of a process that is started again goes on."""
    log = tmp_path / "log"
    child = RealChild("child", ["tests.no_such_module"], log)
    child.process.wait()
    log.write_text("ValueError: of the first run\n")
    assert child.cause() == "ValueError: of the first run"
    child.start()
    child.process.wait()
    assert child.cause() == ""


ENGINE_DIED = """\
INFO: all is well
(EngineCore pid=7) ERROR 11-27 06:52:18 [core.py:946] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-27 06:52:18 [core.py:946] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-27 06:52:18 [core.py:946]     raise ValueError(
(EngineCore pid=7) ERROR 11-27 06:52:18 [core.py:946] ValueError: Free memory on device cuda:0 (0.06/1.0 GiB) is less
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) ValueError: Free memory on device cuda:0 (0.06/1.0 GiB) is less
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
OSError: the socket is gone
"""
WORKER_DIED = """\
(Worker_TP1 pid=9) ERROR 11-27 06:52:18 [executor.py:8] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB
(EngineCore_DP0 pid=7) ERROR 11-27 06:52:18 [core.py:9] Exception: WorkerProc initialization failed due to an \
exception in a background process. See stack trace for root cause.
(EngineCore_DP0 pid=7) RuntimeError: cancelled
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (ENGINE_DIED, "ValueError: Free memory on device cuda:0 (0.06/1.0 GiB) is less"),
        (WORKER_DIED, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"),
        (
            "KeyError: 'a'\nTraceback:\nModuleNotFoundError: No module named 'x'\nbye",
            "ModuleNotFoundError: No module named 'x'",
        ),
        ("an Error: of nothing\n", ""),
        (None, ""),
    ],
)
def test_what_a_process_died_of_is_found_in_its_log(tmp_path: Path, log: str | None, cause: str) -> None:
    """vLLM's engine and its workers are processes of their own: some hundred lines of others follow their error."""
    if log is not None:
        (tmp_path / "log").write_text(log)
    assert cause_in(tmp_path / "log") == cause


def test_what_ended_early_is_told_with_its_cause_first(server: Server, tmp_path: Path) -> None:
    server.start()
    (log := tmp_path / "instance-1.log").write_text(ENGINE_DIED)
    instance: Any = server.children["instance-1"]
    instance.alive, instance.log, instance.tail = False, log, lambda: "its end"
    instance.cause = lambda: cause_in(log)
    with pytest.raises(CliError) as failed:
        server.wait_ready()
    first, *rest = str(failed.value).splitlines()
    assert first == "instance-1 ended early: ValueError: Free memory on device cuda:0 (0.06/1.0 GiB) is less"
    assert rest == [f"the end of {log}:", "its end"]


def test_phases_of_a_start_and_what_keeps_an_instance_from_serving_are_said_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    server.admin_key_file.write_text("key")
    monkeypatch.setattr(up.time, "sleep", lambda _: None)
    starting, failed, again = (
        [("instance-0", error, False), ("instance-1", None, True), ("of-another", "its own", False)]
        for error in (None, "no room", "no memory")
    )
    said: list[str] = []
    monkeypatch.setattr(up.httpx, "get", Answers([("of-another", None, True)], starting, failed, failed, again).get)

    def say(line: str) -> None:
        said.append(line.partition(" s  ")[2])
        assert ServerInfo.read(server.state_dir).state == "starting", "so that `hotswap status` can say it too"
        if said[-1] == "instance-0: no memory":
            monkeypatch.setattr(up.time, "monotonic", lambda: float("inf"))

    server.config = replace(server.config, ready_timeout_s=1234.0)
    with pytest.raises(
        CliError,
        match=r"after 1234 s .*\. instance-0: no memory\nThe logs are in .*logs",
    ):
        server.wait_ready(say=say)
    assert said == [
        *(f"instance-{number}: the engine starts" for number in range(2)),
        *("instance-0: takes its first version", "instance-1: serves"),
        *("instance-0: no room", "instance-0: no memory"),
    ]
    monkeypatch.setattr(up.httpx, "get", Answers([("instance-0", None, True), ("instance-1", None, True)]).get)
    server.wait_ready()
    assert ServerInfo.read(server.state_dir).state == "ready"


def models_file(directory: Path, *models: str) -> Path:
    file = directory / "models.yaml"
    checkpoints = [save_checkpoint(directory / f"checkpoint-{number}", 1.0) for number in range(len(models))]
    entries = [entry.replace("HERE", str(place)) for entry, place in zip(models, checkpoints, strict=True)]
    file.write_text("".join(["models:\n", *(f"  - {{{entry}}}\n" for entry in entries)]))
    return file


def test_models_of_the_file_are_started_beside_that_of_the_command_line(
    server: Server, model: Path, tmp_path: Path
) -> None:
    file = models_file(
        tmp_path,
        "name: toy",
        "name: a/b, checkpoint: HERE, instances: 2, kv-cache-gib: 0.5, vllm-args: [--max-model-len, '64']",
        "name: elsewhere",
    )
    with another(server, name="toy", models=file, instances=1, vllm_args=("--seed=1",)) as several:
        tag = several.models[1].tag
        assert [(m.name, m.instances, m.kv_cache_gib, m.vllm_args) for m in several.models] == [
            ("toy", 1, None, ("--seed=1",)),
            ("a/b", 2, 0.5, ("--seed=1", "--max-model-len", "64")),
        ]
        started = ["gateway", "publish", f"publish-{tag}", "instance-0", f"instance-{tag}-0", f"instance-{tag}-1"]
        assert list(several.children) == started
        assert several.instance_id(1, several.models[1]) == f"instance-{tag}-1"
        args = [several.children[name].args for name in ("instance-0", f"instance-{tag}-0")]  # type: ignore[attr-defined]
        assert "--kv-cache-gib" not in args[0], "the default is the instance's own: another on a CPU than on a GPU"
        assert args[1][args[1].index("--kv-cache-gib") + 1] == "0.5"
        several.children[f"publish-{tag}"].alive = several.children[f"instance-{tag}-1"].alive = False  # type: ignore[misc]
        several.restart_ended()
        assert list(several._restart_at) == [f"instance-{tag}-1"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for GPUs, on a host that has seven."""
    monkeypatch.setattr(up, "for_cpus", lambda: False)
    monkeypatch.setattr(up.gpus, "look", lambda: seven())
    monkeypatch.delenv(DEVICES_ENV, raising=False)


@pytest.mark.usefixtures("gpus")
def test_instances_of_all_models_share_the_devices(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted over the models, in their order; a list that is too short starts nothing."""
    file = models_file(tmp_path, "name: b, checkpoint: HERE, instances: 2, vllm-args: [-tp, '2']")
    others: dict[str, Any] = {"models": file, "instances": 1, "state_dir": tmp_path / "others"}
    monkeypatch.setenv(DEVICES_ENV, "GPU-8a,GPU-51,GPU-99,GPU-03")
    with pytest.raises(CliError, match=r"needed 5 \(1 \+ 2 \+ 2\), visible 4"):
        Server(replace(server.config, **others))
    assert not (tmp_path / "others").exists()
    monkeypatch.setenv(DEVICES_ENV, "GPU-8a,GPU-51,GPU-99,GPU-03,6")
    with another(server, **others) as several:
        given = {name: child.env.get(DEVICES_ENV) for name, child in several.children.items()}  # type: ignore[attr-defined]
    instances = {"instance-0": "GPU-8a", "instance-b-0": "GPU-51,GPU-99", "instance-b-1": "GPU-03,6"}
    assert given == {"gateway": None, "publish": None, "publish-b": None, **instances}


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("known", [True, False])
def test_no_shares_of_the_cpus_cores_where_gpus_compute(
    server: Server, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Of a host whose GPUs nothing can name, too."""
    monkeypatch.setattr(up.gpus, "look", lambda: seven() if known else None)
    with another(server, state_dir=server.state_dir.with_name("two")) as two:
        given = [two.children[f"instance-{index}"].env for index in range(2)]  # type: ignore[attr-defined]
    assert [{BIND_ENV, THREADS_ENV} & env.keys() for env in given] == [set(), set()]
    assert [env.get(DEVICES_ENV) for env in given] == (["0", "1"] if known else [None, None])


@pytest.mark.usefixtures("gpus")
def test_nothing_is_started_where_no_gpu_is_seen(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up.gpus, "look", lambda: Gpus((), why_none="NVML: Driver Not Loaded"))
    config = replace(server.config, state_dir=server.state_dir.with_name("none"))
    with pytest.raises(CliError, match=r"no GPU is seen here \(NVML: Driver Not Loaded\).*--gpus all"):
        Server(config)
    assert not server.state_dir.with_name("none").exists()


def test_the_file_alone_says_what_is_started(tmp_path: Path) -> None:
    file = models_file(tmp_path, "name: elsewhere", "name: first, checkpoint: HERE", "name: second, checkpoint: HERE")
    first, second = served(UpConfig(models=file, instances=4))
    assert (first.name, first.tag, first.instances) == ("first", "", 1)
    assert (second.name, second.tag) == ("second", "second")


@pytest.mark.parametrize(
    ("models", "settings", "said"),
    [
        (["name: toy, checkpoint: HERE"], {"name": "toy"}, "a checkpoint for toy too"),
        (["name: toy"], {"model": None}, "no model there has a checkpoint"),
        (["name: toy, checkpoint: /nowhere/at/all"], {"model": None}, "/nowhere/at/all does not exist"),
        (["name: toy, checkpoint: HERE, vllm-args: ['--api-key=x']"], {"model": None}, "model toy: --api-key"),
        (["name: toy, instances: 2"], {"name": "toy"}, "needs a checkpoint"),
        (["name: u, checkpoint: HERE, upstream: {url: 'https://h/v1'}"], {}, "leave one out"),
    ],
)
def test_models_that_cannot_be_started_are_refused(
    model: Path, tmp_path: Path, models: list[str], settings: dict[str, Any], said: str
) -> None:
    config = UpConfig(**{"model": str(model), "models": models_file(tmp_path, *models), **settings})
    with pytest.raises(CliError, match=re.escape(said)):
        served(config)


@pytest.mark.parametrize(
    ("committed", "there", "published"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_a_shared_store_keeps_its_active_version_while_its_bytes_are_there(
    server: Server, tmp_path: Path, committed: bool, there: bool, published: bool
) -> None:
    url = f"sqlite://{tmp_path}/shared.db"  # in the place of etcd
    server.store = url
    server.config = replace(server.config, store="etcd://stands-for-it")
    with contextlib.closing(SyncStore(url)) as store:
        store.run(ensure_arena(store.store, tmp_path / "arena"))
        with Publisher(url, model="toy") as publisher:
            number = publisher.publish(model_of(1.0), activate=False)
        if committed:
            store.put(Keys("toy").active, ActiveRecord(number, 1, None, "s", 0.0).to_json())
    if not there:
        for slot in (tmp_path / "arena").glob("slot-*"):
            slot.unlink()
    server.start()
    assert ("publish" in server.children) is published
    assert server.arena == tmp_path / "arena"  # where it is recorded, whatever this one's would be


def test_records_of_instances_killed_here_are_ended(server: Server) -> None:
    dead, alive, elsewhere = f"{socket.gethostname()}-1-instance-0", f"{socket.gethostname()}-1-instance-1", "far-1"
    server.state_dir.mkdir()
    server.config = replace(server.config, store="etcd://stands-for-it")
    server.store = f"sqlite://{server.state_dir}/shared.db"

    async def after_start() -> set[str]:
        store = open_store(server.store)
        for name, pid in ((dead, 2**22 + 1), (alive, os.getpid()), (elsewhere, 2**22 + 1)):
            await store.put(Keys("toy").instance(name), InstanceRecord(name, "http://h:1", pid=pid).to_json())
        await asyncio.to_thread(server.start)
        found, _ = await store.list(Keys("toy").instances)
        await store.close()
        return {kv.key.rsplit("/", 1)[1] for kv in found}

    assert asyncio.run(after_start()) == {alive, elsewhere}


def test_a_description_that_cannot_be_read_is_no_running_server(server: Server) -> None:
    server.state_dir.mkdir()
    description = server.state_dir / "server.json"
    description.write_text(json.dumps({"url": "http://h:1", "pid": os.getpid()}))
    server.start()
    assert not description.exists()


@pytest.mark.parametrize("joined", [True, False])
def test_a_draft_model_with_weights_of_its_own_is_published(tmp_path: Path, joined: bool) -> None:
    model = str(save_checkpoint(tmp_path / "a=b", 1.0))

    def found(**config: object) -> Path | None:
        value = json.dumps(config)
        return draft_dir([f"--speculative-config={value}"] if joined else ["-x", "--speculative-config", value])

    assert found(model=model, num_speculative_tokens=3) == found(model=model, method="draft_model") == tmp_path / "a=b"
    assert found(method="ngram", num_speculative_tokens=3) is None
    assert found(method="eagle", model=model) == tmp_path / "a=b"
    assert found(method="mtp", model=model) is None, "it comes in the target's checkpoint"
    assert draft_dir(["--max-model-len", "64"]) is None
    with pytest.raises(CliError, match="not JSON"):
        draft_dir(["--speculative-config", "{"])


def test_it_prints_what_a_publisher_takes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, state = list[str](), tmp_path / ("state" * 20)

    def watch(_: Server) -> None:
        said = capsys.readouterr().out
        assert re.search(f"^admin: http.*, key in {state}/admin.key   logs: {state}/logs$", said, re.MULTILINE), said
        (call,) = re.findall("^trainers: (.*)$", said, re.MULTILINE)
        with eval(call, {"weightsync": weightsync}) as publisher:
            opened.append(publisher.model)
        raise interrupts.Interrupted

    run = run_with(monkeypatch, wait_ready=lambda _, **__: None, watch=watch)
    run(UpConfig(model=str(model), name="toy", state_dir=state, throwaway=True))
    assert opened == ["toy"]


def test_a_torchvision_of_another_torch_is_told_with_its_remedy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(_: Server, **__: Any) -> None:
        raise CliError("instance-0 ended early\nRuntimeError: operator torchvision::nms does not exist")

    run = run_with(monkeypatch, wait_ready=failed)
    with pytest.raises(CliError, match=r"instance-0 ended early(.|\n)*pip uninstall -y torchvision torchaudio"):
        run(UpConfig(model=str(model), name="toy", state_dir=tmp_path / "state", throwaway=True))


def run_with(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> Any:
    """`run_up`, which starts no process and leaves the signals of this one alone."""
    monkeypatch.setattr(up, "Child", Child)
    for name in ("install", "ignore"):
        monkeypatch.setattr(interrupts, name, lambda: None)
    for name, part in parts.items():
        monkeypatch.setattr(Server, name, part)
    return up.run_up


def test_a_description_of_a_later_release_is_read(tmp_path: Path) -> None:
    ServerInfo("http://h:1", "http://h:2", "toy", "", "/key", 1).write(tmp_path)
    written = json.loads((tmp_path / "server.json").read_text())
    (tmp_path / "server.json").write_text(json.dumps({**written, "of_tomorrow": 1}))
    assert ServerInfo.read(tmp_path).url == "http://h:1"
