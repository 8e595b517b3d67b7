"""`hotswap weights` against a real store, real slots and a bucket, and its options against what the admin API takes."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from server.cli.admin import AdminClient
from server.cli.app import app
from server.cli.weights import show_diff
from server.errors import CliError, RequestFailed
from server.up.paths import ServerInfo
from tests.server.asking import answering
from tests.weightsync.bucket.test_bucket import adapter, files, nudged, publisher, weights
from weightsync import Publisher, SlotReader, SyncStore
from weightsync.bucket.objects import Bucket
from weightsync.versions import TensorDiff, VersionDiff


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server's state directory with two versions in its store, as `up` leaves it."""
    arena = tempfile.mkdtemp(prefix="hotswap-cli-test-", dir="/dev/shm")
    monkeypatch.setenv("HOTSWAP_ARENA", arena)
    store = f"sqlite://{tmp_path / 'store.db'}"
    SyncStore(store).close()
    key_file = tmp_path / "admin.key"
    key_file.write_text("a-key-of-the-cli-tests")
    url = "http://127.0.0.1:1"
    ServerInfo(url=url, admin_url=url, model="demo", store=store, admin_key_file=str(key_file), pid=1).write(tmp_path)
    with Publisher(store, model="demo") as publisher:
        for value in (1.0, 1.5):
            tensors = {"a.weight": np.full((4, 8), value, np.float32), "b.weight": np.ones(5, np.float32)}
            publisher.publish(tensors, activate=False)
    yield tmp_path
    shutil.rmtree(arena)


def run(*arguments: object) -> tuple[int, str]:
    """The exit status, and all that is said: the error of a command that fails, too."""
    done = CliRunner().invoke(app, ["weights", *map(str, arguments)], env={"COLUMNS": "200"}, terminal_width=200)
    failed = None if isinstance(done.exception, SystemExit) else done.exception
    assert failed is None or isinstance(failed, CliError)
    return done.exit_code, done.output + str(failed or "")


def slot_of(state_dir: Path, version: int) -> Path:
    with Publisher(f"sqlite://{state_dir / 'store.db'}", model="demo", lineage="test") as publisher:
        return Path(next(v.slot for v in publisher.versions() if v.version == version))


def test_records_are_found_without_a_state_directory(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod: the store's URL is in the environment, and nobody has run `up`."""
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(state_dir / "none"))
    monkeypatch.setenv("HOTSWAP_STORE", f"sqlite://{state_dir / 'store.db'}")
    assert "version 2 is as published" in run("verify", "--name", "demo")[1]
    assert "versions 1 and 2: 1 of 2 tensors differ" in run("diff", "1", "2", "--name", "demo")[1]
    assert "say which one with --name" in run("verify")[1]


def test_verify_says_what_was_read_and_names_the_tensor_that_differs(state_dir: Path) -> None:
    status, out = run("verify", "--state-dir", state_dir)
    assert (status, "version 2 is as published: 2 tensors, 148 bytes" in out) == (0, True)
    path = slot_of(state_dir, 2)
    with SlotReader.open(path) as slot:
        place = slot.entry("b.weight").offset + 3
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\x7f")
    status, out = run("verify", "--state-dir", state_dir)
    assert status == 1
    assert "digest_mismatch: tensor 'b.weight'" in out
    status, out = run("verify", "--json", "--state-dir", state_dir)
    assert (status, json.loads(out)["problems"][0]["tensor"]) == (1, "b.weight")
    status, out = run("verify", "1", "--json", "--state-dir", state_dir)
    report = json.loads(out)
    assert (status, report["ok"], report["version"], report["problems"]) == (0, True, 1, [])


def test_diff_shows_what_changed(state_dir: Path) -> None:
    status, out = run("diff", 1, 2, "--state-dir", state_dir)
    assert status == 0
    assert "1 of 2 tensors differ, 32 of 37 elements" in out
    _, out = run("diff", 1, 2, "--json", "--state-dir", state_dir)
    first = json.loads(out)["tensors"][0]
    assert (first["name"], first["changed"], first["max_abs"]) == ("a.weight", 32, 0.5)
    _, out = run("diff", 1, 1, "--state-dir", state_dir)
    assert "0 of 2 tensors differ" in out


NAMES = [f"model.layers.{index}.self_attn.o_proj.weight" for index in (9, 10)]
NUMBERS = ["max abs", "max rel", "mean abs", "not finite"]


def shown_diff(capsys: pytest.CaptureFixture[str]) -> str:
    tensors = [TensorDiff(n, "bfloat16", 589_824, "changed", 589_001, 0.5, 0.25, 0.125, 0) for n in NAMES]
    show_diff(VersionDiff(1, 2, tuple(tensors)), as_json=False)
    return re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)


def test_a_pipe_gets_a_diff_in_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown_diff(capsys)
    for name in NAMES:
        assert re.search(rf"{name} +bfloat16 +589,824 +589,001 .* 0.5 +0.25 +0.125 *$", said, re.MULTILINE), said


def test_a_terminal_gets_the_columns_of_a_diff_that_have_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    said = shown_diff(capsys)
    assert max(map(len, said.splitlines())) <= 80
    for name in NAMES:
        assert re.search(rf"{name} +bfloat16 +589,824 +589,001 +99.860% *$", said, re.MULTILINE), said
    assert "no room for max abs, max rel, mean abs, not finite: use" in said
    monkeypatch.setenv("COLUMNS", "160")
    said = shown_diff(capsys)
    assert [column for column in NUMBERS if column not in said] == []
    assert "no room" not in said


def test_a_version_that_is_not_held_is_said_so(state_dir: Path) -> None:
    for arguments in (("verify", 9), ("diff", 1, 9)):
        assert "version 9 does not exist" in run(*arguments, "--state-dir", state_dir)[1]


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    [
        (("push", ".", "--no-activate"), "/admin/weights", {"activate": False, "path": str(Path.cwd())}),
        (("push", "--without", "lora/x"), "/admin/weights", {"activate": True, "without": ["lora/x"]}),
        (("push", ".", "--cast"), "/admin/weights", {"activate": True, "cast": True, "path": str(Path.cwd())}),
        (
            ("push", ".", "--strip", "module."),
            "/admin/weights",
            {"activate": True, "strip": "module.", "path": str(Path.cwd())},
        ),
        (("activate", 3), "/admin/weights/activate", {"version": 3}),
        (("rollback",), "/admin/weights/rollback", {"version": None}),
        (("rollback", 4), "/admin/weights/rollback", {"version": 4}),
        (
            ("split", "3=90", "4=10%", "--sticky", "key", "--minimum", 2, "--shadow", "4=5"),
            "/admin/weights/split",
            {
                "shares": [{"version": 3, "percent": 90.0}, {"version": 4, "percent": 10.0, "shadow": 5.0}],
                "sticky": "key",
                "minimum": 2,
            },
        ),
    ],
)
def test_how_a_fleet_takes_a_version_is_passed_on(
    arguments: tuple[Any, ...], path: str, body: dict[str, Any], state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def call(_: AdminClient, *what: Any) -> dict[str, Any]:
        asked.append(what)
        return {"version": 3}

    monkeypatch.setattr(AdminClient, "call", call)
    run(*arguments, "--state-dir", state_dir)
    how = {"mode": "together", "drain_s": None, "deadline_s": None, "on_lost": "abort"}
    assert asked.pop() == ("POST", path, body | how, None)
    options = ("--mode", "rolling", "--drain", 5, "--deadline", 60, "--reason", "why not")
    run(*arguments, *options, "--state-dir", state_dir)
    how |= {"mode": "rolling", "drain_s": 5.0, "deadline_s": 60.0}
    assert asked.pop() == ("POST", path, body | how, "why not")
    assert run(*arguments, "--mode", "sideways", "--state-dir", state_dir)[0] == 2


def test_a_push_says_which_files_the_version_keeps(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"version": 3, "swap": None, "kept": ["generation_config.json", "chat template"]}
    monkeypatch.setattr(AdminClient, "call", lambda *_: kept)
    said = run("push", ".", "--no-activate", "--state-dir", state_dir)[1]
    assert "kept as served: generation_config.json, chat template" in said
    kept["kept"] = []
    assert "kept" not in run("push", ".", "--no-activate", "--state-dir", state_dir)[1]


SPLIT = {"shares": [{"version": 4, "percent": 10.0, "instances": ["i1", "i2"]}], "sticky": "", "minimum": 1}


def test_a_split_is_shown_and_ended(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    made = {"nbytes": 10, "created_at": 0.0, "step": None, "state": "ready"}
    listed = {
        "active": {"version": 3, "split": SPLIT},
        "versions": [{"version": 1, **made, "state": "retired"}, *({"version": v, **made} for v in (3, 4, 5))],
    }

    def call(_: AdminClient, *what: Any) -> dict[str, Any]:
        asked.append(what)
        report = {"version": 3, "previous": 2, "prepare_ms": 1.0, "commit_ms": 1.0, "split": SPLIT}
        return listed if what[0] == "GET" else report

    monkeypatch.setattr(AdminClient, "call", call)
    rows = [line.split() for line in run("list", "--state-dir", state_dir)[1].splitlines()]
    found = {row[0]: row[1:5] for row in rows if row[:1] in (["3"], ["4"], ["5"])}
    assert (found["3"][:4], found["4"][:3]) == (["ready", "active", "90", "%"], ["ready", "10", "%"])
    assert "%" not in found["5"]
    assert " ".join(rows[-1]) == "and 1 retired: no longer held (--keep-versions), listed with --all"
    listing = run("list", "--all", "--state-dir", state_dir)[1].splitlines()
    assert any(line.split()[:2] == ["1", "retired"] for line in listing)
    assert "--all" not in listing[-1]
    said = run("split", "3=90", "4=10", "--state-dir", state_dir)[1]
    assert "version 4 has 10 % of the requests, on i1, i2" in said
    assert "version 3 is active, with the other requests; staged in 1 ms" in said
    run("split", "--end", "--state-dir", state_dir)
    assert asked.pop() == ("DELETE", "/admin/weights/split", None, None)
    for wrong in ((), ("3=90", "4=10", "--end"), ("3", "4=10"), ("3=90", "x=10"), ("3=50", "3=50")):
        assert run("split", *wrong, "--state-dir", state_dir)[0] == 1


def test_a_url_and_a_key_are_enough_where_no_server_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("HOTSWAP_ADMIN_KEY", raising=False)
    with answering(lambda *_: (502, b"<html>Bad Gateway</html>")) as page:
        with pytest.raises(CliError, match="no server was started"):
            AdminClient(None, page).call("GET", "/admin/keys")
        monkeypatch.setenv("HOTSWAP_ADMIN_KEY", "secret")
        with pytest.raises(RequestFailed, match="HTTP 502 and no JSON; is that the admin port"):
            AdminClient(None, page).call("GET", "/admin/keys")


def test_a_version_is_exported(state_dir: Path) -> None:
    home, target = state_dir / "model", state_dir / "out"
    home.mkdir()
    (home / "config.json").write_text("{}")
    status, said = run("export", 2, target, "--model-dir", home, "--state-dir", state_dir)
    assert (status, "version 2: 2 tensors, 148 bytes" in said) == (0, True)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert "not an empty directory" in run("export", 1, target, "--model-dir", home, "--state-dir", state_dir)[1]


# of a bucket


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Two versions of the base and one of an adapter."""
    url = f"file://{tmp_path}/bucket/run"
    pub, tensors = publisher(url), weights()
    pub.publish(tensors, step=3)
    pub.publish(nudged(tensors), step=4)
    pub.publish(adapter(1.0), part="lora/math")
    return url


def test_the_list_says_what_each_version_is(url: str) -> None:
    status, out = run("list", "--bucket", url)
    assert status == 0
    one, two, three = (line.split() for line in out.splitlines() if line.strip()[:1].isdigit())
    assert (one[:3], two[:4]) == (["1", "base", "full"], ["2", "base", "delta", "1"])
    assert three[:3] == ["3", "lora/math", "full"]
    rows = orjson.loads(run("list", "--bucket", url, "--json")[1])
    versions = [Bucket(url).read(number) for number in (1, 2, 3)]
    assert [row["nbytes"] for row in rows] == [version.nbytes for version in versions]
    assert [row["digest"] for row in rows] == [version.header.target_digest for version in versions]
    assert (rows[1]["step"], rows[2]["others"], rows[2]["objects"]) == (4, {"": 2}, 1)


def test_verify_reads_every_byte_and_names_what_is_damaged(url: str) -> None:
    status, out = run("verify", "--bucket", url)
    assert (status, "version 3 is as published" in out, "versions 1, 2, 3" in out) == (0, True, True)
    part = Bucket(url).read(1).parts[0].path
    path = Path(url.removeprefix("file://")) / part
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    status, out = run("verify", 2, "--bucket", url)
    assert status == 1
    assert part in out
    status, out = run("verify", 9, "--bucket", url)
    assert (status, "version 9 is no longer in" in out) == (1, True)
    status, out = run("verify", "--bucket", f"{url}-empty")
    assert (status, "has no version yet" in out) == (1, True)
    assert run("verify", "--bucket", url, "--trust", "key.pem")[0] == 1


def test_a_record_that_cannot_be_read_is_listed_as_damaged(url: str) -> None:
    path = Path(url.removeprefix("file://")) / "versions" / f"{2:012}.json"
    path.write_bytes(path.read_bytes()[:-3])
    status, out = run("list", "--bucket", url)
    assert status == 1
    assert "damaged" in out
    assert f"{2:012}.json" in out


def test_remove_keeps_what_others_need(url: str) -> None:
    status, out = run("remove", 1, "--bucket", url)
    assert (status, "versions 2 need it" in out) == (1, True)
    publisher(url, keep=9).publish(weights(5))
    before = files(url)
    assert run("remove", 3, "--bucket", url)[0] == 1  # the newest version has its adapter
    assert files(url) == before
    assert run("remove", 2, "--bucket", url) == (0, "version 2 is removed\n")
    assert Bucket(url).numbers() == [1, 3, 4]
