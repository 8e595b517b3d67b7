"""The queries of dashboard and alert rules, read by a real PromQL parser, and what a page of metrics really offers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families

MONITORING = Path(__file__).parent.parent / "k8s" / "hotswap" / "files"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
TARGET_LABELS = {"job", "instance", "worker"}  # put on by Prometheus, and by gateways with several workers
_VARIABLES = {"$__rate_interval": "5m", "${datasource}": "prometheus"}


@dataclass(frozen=True)
class Use:
    """A series a query reads: its name, the labels it is matched by, with their values, and those it is grouped by."""

    name: str
    matched: tuple[tuple[str, str, str], ...]  # label, operator, value
    grouped: frozenset[str]


@dataclass
class Page:
    """Sample name -> label -> the values it has there."""

    labels: dict[str, dict[str, set[str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, *pages: str) -> Page:
        self = cls()
        for family in (f for page in pages for f in text_string_to_metric_families(page)):
            for sample in family.samples:
                known = self.labels.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    known.setdefault(label, set()).add(value)
        return self


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(where, query) of all."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for rule in alerts():
        yield rule["alert"], rule["expr"]


def parsed(query: str) -> promql.Expr:
    """Raises ValueError for what is not PromQL."""
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    return promql.parse(query)


def uses(expr: Any, grouped: frozenset[str] = frozenset()) -> Iterator[Use]:
    """Every series `expr` reads. Labels named by `by` count for all below."""
    if isinstance(expr, promql.VectorSelector):
        matchers = tuple((m.name, str(m.op).rpartition(".")[2], m.value) for m in expr.matchers.matchers)
        yield Use(expr.name or "", matchers, grouped)
    elif isinstance(expr, promql.MatrixSelector):
        yield from uses(expr.vector_selector, grouped)
    elif isinstance(expr, promql.AggregateExpr):
        by = frozenset(expr.modifier.labels) if expr.modifier is not None else frozenset()
        yield from uses(expr.expr, grouped | by)
    elif isinstance(expr, promql.BinaryExpr):
        yield from uses(expr.lhs, grouped)
        yield from uses(expr.rhs, grouped)
    elif isinstance(expr, promql.Call):
        for argument in expr.args:
            yield from uses(argument, grouped)
    elif isinstance(expr, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr)):
        yield from uses(expr.expr, grouped)
    elif not isinstance(expr, (promql.NumberLiteral, promql.StringLiteral)):
        raise TypeError(f"a kind of expression these tests do not know: {type(expr).__name__}")


def faults(page: Page, prefix: str) -> list[str]:
    """Series, labels and values that queries of series with that prefix ask for and that are not on the page."""
    found = []
    for where, query in queries():
        for use in uses(parsed(query)):
            if use.name.startswith(prefix):
                found += [f"{where}: {fault}" for fault in _faults(use, page)]
    return found


def _faults(use: Use, page: Page) -> Iterator[str]:
    offered = page.labels.get(use.name)
    if offered is None:
        yield f"there is no {use.name}"
        return
    for label in (use.grouped | {label for label, _, _ in use.matched}) - TARGET_LABELS - offered.keys():
        yield f"{use.name} has no label {label}"
    for label, operator, value in use.matched:
        if operator == "Equal" and label in offered and value not in offered[label]:
            yield f"{label} of {use.name} is never {value}"
        if operator == "Re" and label in offered:
            alternatives = value.split("|") if re.fullmatch(r"[\w|]+", value) else []
            yield from (f"{label} of {use.name} is never {a}" for a in alternatives if a not in offered[label])
