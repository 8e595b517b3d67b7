"""docs/api.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from server import api, key_limits
from server.errors import KINDS
from server.gateway import GatewayConfig, QueueSettings, UpstreamSettings, config, error_map
from server.gateway.admin.trainers import REFUSALS
from server.gateway.app import build_app
from server.gateway.error_map import DETAILS, STATUS
from server.gateway.fleet import routing
from server.gateway.fleet.instance import FIELDS
from server.gateway.fleet.view import Fleet
from server.gateway.metrics import METRICS, SIGNALS, Counted, table
from server.gateway.models.directory import Directory
from server.gateway.models.served import Served
from server.gateway.observe.stats import Stats
from server.gateway.queue.gate import Gate
from server.gateway.routes import admin_names, public_names
from server.gateway.wire.head import _FORWARDED

ROOT = Path(__file__).parents[3]
API = (ROOT / "docs" / "api.md").read_text()
GATEWAY = (ROOT / "docs" / "gateway.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()
ADAPTERS = (ROOT / "docs" / "adapters.md").read_text()
ROOMS = (ROOT / "server" / name for name in ("gateway", "answers"))
SOURCES = "".join(p.read_text() for p in [*(p for r in ROOMS for p in r.rglob("*.py")), ROOT / "server" / "errors.py"])


def test_every_route_is_documented() -> None:
    app = build_app(GatewayConfig(store="sqlite:///nowhere/store.db", model="toy"))
    admin = set(app.openapi()["paths"])
    assert api.table() in API, "run `make tables`"
    documented = set(re.findall(r"`(?:GET|POST|DELETE) (/\S+)`", API + ADAPTERS))
    assert documented == {*public_names(), *admin_names(), *admin}


def test_the_table_of_metrics_is_made_of_their_declarations() -> None:
    assert table() in API, "run `make tables`"
    documented = set(re.findall(r"`(hotswap_\w+)`", API)) - {"hotswap_weight_versions"}  # a field of answers
    stats, directory = Stats(), Directory()
    fleet = Fleet(None, "toy", UpstreamSettings(), stats)  # type: ignore[arg-type]
    directory.use([Served("toy", fleet, Gate(fleet, QueueSettings()), stats)], {})
    counted = Counted(stats.process, directory)
    families = [metric.family(counted) for metric in METRICS]
    assert documented == {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert SIGNALS.keys() == set(FIELDS)


def test_the_table_of_limits_is_made_of_their_declarations() -> None:
    assert key_limits.table() in GATEWAY, "run `make tables`"
    assert key_limits.header_table() in API, "run `make tables`"


def test_the_table_of_the_engine_s_errors_is_made_of_their_codes() -> None:
    assert error_map.table() in (ROOT / "docs" / "errors.md").read_text(), "run `make tables`"


def test_every_code_in_the_table_exists() -> None:
    table = API.partition("## Errors")[2].partition("## Connections")[0]
    documented = {
        code
        for row in re.findall(r"^\| \d+ \| ([^|]+) \|", table + ADAPTERS, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", row)
    }
    own = set(re.findall(r'code="(\w+)"', SOURCES)) | {code for _, code in KINDS.values()}
    limits = {f"{limit.name}_limit" for limit in key_limits.LIMITS.values() if limit.counts in ("minute", "now")}
    known = own | limits | STATUS.keys() | REFUSALS.keys()
    assert documented <= known
    base = {"internal_error", "bad_request", "conflict", "unprocessable", "insufficient_storage"}
    assert known - STATUS.keys() - base <= documented


def test_every_option_and_detail_is_documented() -> None:
    listed = OPTIONS.partition("## `hotswap gateway`")[2].partition("\n## ")[0]
    assert {setting.flag for setting in config.OPTIONS} == set(re.findall(r"^\| `(--[\w-]+)`", listed, re.MULTILINE))
    for name in (*DETAILS, *(header.decode() for header in _FORWARDED)):
        assert f"`{name}`" in API, name


def test_every_routing_policy_is_documented() -> None:
    table = GATEWAY.partition("| policy |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == set(routing.POLICIES)
    option = next(setting for setting in config.OPTIONS if setting.flag == "--routing")
    assert routing.CHOICES in option.option.help
    assert option.default == routing.DEFAULT
