"""Ranks without common memory publish one version: the same bytes as ever, over a real transport, or a clear error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from server.ports import free_port
from tests.trainer.faults.runs import arguments, fine_tuning
from tests.trainer.fleet import fleet, keep, same_tensors
from tests.trainer.ranks import Ranks
from tests.waiting import wait_until
from tests.weightsync.peer.hosts import Hosts

TWO, FOUR = ["", "b"], ["", "b", "", "b"]
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama-tied", {"tensor": 2}, TWO),
    ("qwen2", {"pipeline": 2}, TWO),
    ("qwen3", {"data": 2, "shard": "full"}, TWO),
    ("qwen2", {"tensor": 2, "pipeline": 2}, FOUR),
    ("qwen2", {"pipeline": 2, "data": 2}, ["", "b", "c", "c"]),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "parallel", "hosts"), CASES)
def test_a_run_on_several_hosts_publishes_what_one_rank_does(
    one_rank: Ranks, small_models: dict[str, str], tmp_path: Path, model: str, parallel: Any, hosts: list[str]
) -> None:
    path = small_models[model]
    with fleet(path, tmp_path) as running:
        received, ranks = keep(running), one_rank.spread(parallel)
        arguments = {"path": path, "store": running.store_url, "steps": 2, "parallel": parallel}
        answers = ranks.call("publish_from_hosts", hosts=hosts, **arguments)
        ranks.call("publish_from_hosts", hosts=[""] * len(hosts), **arguments)
    assert len({tuple(answer["versions"]) for answer in answers}) == 1
    for rank, answer in enumerate(answers):
        assert not answer["held"] or hosts[rank] != ""
        assert answer["regions"][0] == answer["regions"][1], "memory was registered twice"
    assert any(answer["held"] for answer in answers) == (parallel.keys() != {"data", "shard"})  # rank 0 has it all
    check_same(received)
    assert any(not torch.equal(received[0][name], received[2][name]) for name in received[0])


def check_same(received: list[dict[str, torch.Tensor]]) -> None:
    """Tensors of three versions from several hosts are those from one."""
    assert len(received) == 6
    assert all(same_tensors(apart, together) for apart, together in zip(received[:3], received[3:], strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("memory", "rank 1 could not write its share: made to have no memory"),
        ("transport", "rank 1 could not write its share: .*made to have ended"),
        ("holder", "rank 0 could not write its share: .*cannot be reached"),
        ("bytes", "rank 0 could not write its share: what came from another host is not what was written"),
    ],
)
def test_a_share_that_does_not_come_costs_one_version(
    two_ranks: Ranks, qwen2: str, tmp_path: Path, broken: str, said: str
) -> None:
    with fleet(qwen2, tmp_path) as running:
        arguments = {"path": qwen2, "store": running.store_url, "parallel": {"tensor": 2}}
        lead, other = two_ranks.call("publish_broken", broken=broken, hosts=TWO, **arguments)
        assert running.versions == [int(lead[2])]
    assert (lead[0], other[0]) == ("PublishError", "RankFailed")
    assert re.search(said, lead[1])


@contextlib.contextmanager
def peers(store_url: str, directory: Path, monkeypatch: pytest.MonkeyPatch, names: str) -> Iterator[Hosts]:
    """A peer on each host, when all of them have said what they can do."""
    hosts = Hosts(store_url, directory, monkeypatch, "tiny")
    try:
        for name in names:
            hosts.start(name)
        wait_until(lambda: len(hosts.store.list("copies/tiny/takers/")[0]) == len(names), 120)
        yield hosts
    finally:
        hosts.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("parallel", "names", "cut"),
    [
        ({"pipeline": 2}, "ab", False),
        ({"tensor": 2, "pipeline": 2}, "aabb", False),  # tensors are cut within a host
        ({"tensor": 2}, "ab", True),
        ({"tensor": 2, "pipeline": 2}, "abab", True),
    ],
)
def test_what_ranks_write_stays_on_their_hosts(
    one_rank: Ranks,
    qwen2: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, Any],
    names: str,
    cut: bool,
) -> None:
    """The host of rank 0 reads hardly anything unless tensors are cut across hosts, and a third host, which reads from
    both, serves what one host would have published."""
    received, ranks = list[dict[str, torch.Tensor]](), one_rank.spread(parallel)
    for at, hosts in (("several", list(names)), ("one", [""] * len(names))):
        root = tmp_path / at
        root.mkdir()
        host = "c" if at == "several" else ""
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(fleet(qwen2, root, host=host))
            kept = keep(running)
            there = stack.enter_context(peers(running.store_url, root, monkeypatch, "abc" if host else ""))
            arguments = {"path": qwen2, "store": running.store_url, "steps": 2, "parallel": parallel}
            answers = ranks.call("publish_from_hosts", hosts=hosts, **arguments)
            received += kept
            if not host:
                assert not any(answer["gathered"] for answer in answers)
                continue
            nbytes = sum(tensor.nbytes for tensor in received[-1].values())
            came = [there.metric("c", "hotswap_peer_received_bytes_total", holder=holder) for holder in "ab"]
            gathered = sum(sum(answer["gathered"]) for answer in answers) / 3
        assert not any(answer["held"] for answer in answers), "memory besides the slots"
        assert sum(came) >= 3 * nbytes
        if not cut:
            assert min(came) > nbytes / 10, "one host sent nearly all of it"
            assert gathered < nbytes / 4, (gathered, nbytes)
    check_same(received)


@pytest.mark.parametrize(
    ("broken", "said", "there"),
    [("share", "host b could not keep its share: made to refuse", 0), ("answer", "made not to answer", 1)],
    ids=["a host that does not keep its share", "a commit that was not answered"],
)
def test_one_version_is_reported_as_failed_and_a_third_host_gets_those_that_are_there(
    two_ranks: Ranks,
    qwen2: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    said: str,
    there: int,
) -> None:
    """No rank knows of a version whose commit was not answered; hosts keep its shares all the same."""
    with fleet(qwen2, tmp_path, host="c") as running, peers(running.store_url, tmp_path, monkeypatch, "abc"):
        arguments = {"path": qwen2, "store": running.store_url, "parallel": {"pipeline": 2}}
        lead, other = two_ranks.call("publish_broken", broken=broken, hosts=["a", "b"], **arguments)
        newest = int(lead[2])
        assert running.versions == list(range(newest - there, newest + 1))
    assert (lead[0], other[0]) == ("PublishError", "RankFailed")
    assert said in lead[1]


@pytest.mark.broad
def test_a_run_that_another_launcher_starts_on_two_hosts(qwen2: str, tmp_path: Path) -> None:
    """Each rank is a process with a host's name of its own; each publishes after every step."""
    with fleet(qwen2, tmp_path) as running:
        config = fine_tuning(qwen2, 2, parallel={"tensor": 2}, publish=running.sections["publish"])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "trainer.main", *arguments(config, tmp_path)],
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": "0", "HOTSWAP_HOST": host},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(TWO)
        ]
        try:
            said = [rank.communicate(timeout=240) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0, 0], said
        events = [json.loads(line) for line in said[0][0].splitlines()]
        published = [event["version"] for event in events if event["event"] == "step"]
        assert running.versions[-2:] == published, events


ALONE = "one of several hosts', cannot pass on its share"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"address": "0.0.0.0"}, f"publish: rank 0, {ALONE}.*Set HOTSWAP_CLUSTER_TLS"),
        ({"master": "no-such-host.invalid"}, f"publish: rank 1, {ALONE} .*HOTSWAP_ADDRESS"),
        ({"hosts": ["", "Node_1"]}, "publish: rank 1's host has no name .*'Node_1'"),
    ],
    ids=["no certificates", "out of reach", "no name"],
)
def test_a_host_that_cannot_take_part_ends_the_run_on_all(
    two_ranks: Ranks, qwen2: str, tmp_path: Path, how: dict[str, Any], said: str
) -> None:
    arguments = {"path": qwen2, "store": f"sqlite:///{tmp_path}/absent.db"}
    arguments |= {"hosts": TWO, "master": "127.0.0.1", "address": None} | how
    lead, other = two_ranks.call("complaint", of="publish_towards", **arguments)
    assert (lead[0], other[0]) == ("ConfigError", "RankFailed")
    assert re.match(said, lead[1])


def test_a_host_is_reached_where_it_reaches_the_first(one_rank: Ranks) -> None:
    assert one_rank.call("address_towards", master="localhost", address=None) == ["127.0.0.1"]
    assert one_rank.call("address_towards", master="127.0.0.1", address="10.0.0.7") == ["10.0.0.7"]
