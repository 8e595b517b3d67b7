"""All checks at once, on this host; what is printed; the exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from server.cli.app import app
from server.doctor import report
from server.doctor.registry import Check, Finding, all_checks, fail, ok, skip, warn
from server.doctor.world import World
from server.errors import CliError
from tests.server.doctor.worlds import host

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
    rows = report.diagnose(host(tmp_path, port=0), all_checks())
    assert not [row for row in rows if "the check broke" in row.finding.found]


def test_the_table_says_what_to_mend_and_counts() -> None:
    rows = [ok("well"), warn("so so", "do this"), fail("bad [x]", "do that"), skip("not here")]
    console = Console(width=100, record=True)
    report.show([report.Result("name", row) for row in rows], console)
    text = console.export_text()
    assert all(word in text for word in ("do this", "do that", "bad [x]", "1 ok, 1 warn, 1 fail, 1 skip"))


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
    rows = report.diagnose(World(), checks)
    assert [(row.check, row.finding.status) for row in rows] == [("broken", "fail"), ("sound", "ok")]
    assert "RuntimeError: no such thing" in rows[0].finding.found


def test_the_page_lists_every_check() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(), re.MULTILINE)
    assert listed == [check.name for check in all_checks()]
