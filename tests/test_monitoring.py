"""Dashboard and alert rules read series, labels and values that exist (vLLM's: live/fleet/test_monitoring.py)."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path

import promql_parser as promql
import pytest

from server.gateway import UpstreamSettings
from server.gateway.queue import gate as queue_gate
from tests import monitoring
from tests.monitoring import DASHBOARD, Page, alerts, faults, panels, parsed, queries, uses
from tests.server.gateway.harness import get, post, running_gateway
from tests.server.gateway.upstream import Link, Received, upstream
from tests.waiting import eventually

VLLM = b"""vllm:num_requests_running{engine="0"} 1.0
vllm:prompt_tokens_total{engine="0"} 1.0
vllm:generation_tokens_total{engine="0"} 1.0
"""


class Instance:
    """Enough for every series to appear: counted streams, broken answers, signals, and slow ones until freed."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def __call__(self, link: Link, received: Received) -> None:
        if received.target == "/metrics":
            await link.json(VLLM)
        elif received.target == "/health":
            await link.json()
        elif b"break" in received.body:
            await link.send(b"nonsense\r\n\r\n")
        else:
            if b"slow" in received.body:
                await self.free.wait()
            await link.sse_head()
            await link.chunk(b'data: {"hotswap_usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n')
            await link.end()


@pytest.fixture
async def page(tmp_path: Path) -> Page:
    """The page that a gateway offers after a little of everything."""
    instance = Instance()
    settings = UpstreamSettings(scrape_interval_s=0.05, scrape_timeout_s=10.0, max_in_flight=1)
    with running_gateway(tmp_path, upstream=settings) as gateway:
        async with upstream(instance) as up:
            gateway.register(up)
            for raw in (post(), post(body={"prompt": "break"}), post(body=b"{"), get("/v1/models")):
                await gateway.ask(raw)
            stats, gate = gateway.gateway.default.stats, gateway.gateway.default.gate
            waiting = [asyncio.create_task(gateway.ask(post(body={"prompt": "slow"}))) for _ in range(2)]
            await eventually(lambda: gate.queue.waiting == 1)
            depths = (await gateway.ask(get("/metrics"))).body.decode()
            instance.free.set()
            await asyncio.gather(*waiting)
            # Counts that take a fleet that dies, or is overrun, to come about; the words are those of the code.
            stats.holds["fleet", "served"] += 1
            gate.outcomes.update((0, outcome) for outcome in ("served", "refused", "displaced", "timed_out"))
            assert all(f'"{outcome}"' in inspect.getsource(queue_gate) for _, outcome in gate.outcomes)
            stats.shared(1, 200, 0.1, 0.05)
            gateway.gateway.default.fleet.shadows.outcomes[2, "answered"] += 1
            await eventually(lambda: gateway.gateway.default.fleet.instances["i0"].signals is not None)
            return Page.of(depths, (await gateway.ask(get("/metrics"))).body.decode())


async def test_every_series_of_the_gateway_exists(page: Page) -> None:
    assert faults(page, "hotswap_") == []
    assert faults(page, "process_") == []


def test_only_known_sources_are_read() -> None:
    names = {use.name for _, query in queries() for use in uses(parsed(query))}
    assert {name for name in names if not name.startswith(("hotswap_", "process_", "vllm:"))} == set()
    assert len(names) > 50


@pytest.mark.parametrize("where", ["dashboard", "alerts"])
def test_a_wrong_name_or_label_would_be_found(where: str, page: Page) -> None:
    wrong = {
        "hotswap_gateway_requests": "there is no",
        "sum by (instance) (hotswap_active_epoch) > sum by (nothing) (hotswap_active_epoch)": "has no label nothing",
        'hotswap_instance_state{state="BROKEN"}': "is never BROKEN",
        'hotswap_swaps_total{outcome=~"done|lost"}': "is never lost",
    }
    for query, fault in wrong.items():
        panel = {"type": "x", "title": "t", "targets": [{"expr": query}]}
        rule = {"alert": "a", "expr": query}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(monitoring.DASHBOARD, "panels", [panel] if where == "dashboard" else [])
            patch.setitem(monitoring.RULES, "groups", [{"rules": [rule]}] if where == "alerts" else [])
            assert any(fault in found for found in faults(page, "hotswap_")), query


# rules


def test_rules_are_whole() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    for rule in alerts():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"].keys() == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
        used = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
        expr = parsed(rule["expr"])
        grouped = {label for use in uses(expr) for label in use.grouped}
        assert used <= grouped, rule["alert"]
        compares = isinstance(expr, promql.BinaryExpr) or (isinstance(expr, promql.Call) and expr.func.name == "absent")
        assert compares, f"{rule['alert']} would fire whenever there are samples"


# dashboard


def test_the_dashboard_is_whole() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job"}
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            assert used <= {*variables, "__rate_interval"}
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = {label for use in uses(parsed(target["expr"])) for label in use.grouped}
            assert named <= grouped | {"instance", "worker"}, panel["title"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
