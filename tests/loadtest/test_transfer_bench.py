"""The transfer benchmark, on a few bytes."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from loadtest.hosts.namespaces import obstacle
from loadtest.transfer import bench as transfer
from loadtest.transfer.peer import RAW
from tests.lacking import unable
from weightsync.transport import available


@pytest.mark.broad
def test_it_measures_every_transport_that_is_there(tmp_path: Path) -> None:
    report = transfer.run(tmp_path / "transfer.json", small=True, parts=["reads"])
    assert report == orjson.loads((tmp_path / "transfer.json").read_bytes())
    there = {name for name, reason in available().items() if not reason}
    assert set(report["by_transport"]) == there | {RAW, transfer.TLS}
    assert set(report["by_receivers"]) == set(report["by_hosts"]) == {"1", "2"}
    assert report["by_hosts"]["1"]["from_source"] == 1.0
    assert all(found["best_gbps"] >= found["median_gbps"] > 0 for found in report["by_transport"].values())


@pytest.mark.broad
def test_a_version_comes_to_hosts_behind_links(tmp_path: Path) -> None:
    if reason := obstacle():
        unable(reason)
    report = transfer.run(tmp_path / "links.json", small=True, parts=["links"])
    found = report["by_links"]
    assert {key for key in found if key[0].isdigit()} == {"1", "2", "2 of 2 places"}
    assert 0.45 < found["2 of 2 places"]["read_by_each"] < 0.8  # chunks are large here
    assert min(found["1"]["of_a_link"], found["2"]["of_a_link"]) > 0.9  # nothing is faster than its link
    assert found["1"]["copies_from_source"] == 1.0
