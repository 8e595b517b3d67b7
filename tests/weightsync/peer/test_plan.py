"""The planner: what holds for any holders and any order of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.weightsync.codes import refused
from weightsync.peer.chunks import Bitmap
from weightsync.peer.holders import LOOKS, MOST_LOOKS, PATIENCE_S, Feeders, Patience
from weightsync.peer.plan import LEAST_MARGIN, Assignment, Holder, Planner, choose, feeders, halves

CHUNKS = st.integers(1, 40)
Situation = tuple[Planner, list[Holder], Bitmap, list[Assignment]]


@st.composite
def bitmaps(draw: st.DrawFn, chunks: int) -> Bitmap:
    return Bitmap(chunks, draw(st.integers(0, (1 << chunks) - 1)))


@st.composite
def holders_of(draw: st.DrawFn, chunks: int) -> list[Holder]:
    have = st.one_of(st.none(), bitmaps(chunks))
    found = draw(st.lists(st.tuples(st.integers(0, 2), have, st.integers(0, 3)), max_size=6))
    return [Holder(f"h{n}", *fields) for n, fields in enumerate(found)]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """A planner in the middle of a fetch: some chunks done, some in flight, one of those perhaps from a lost host."""
    chunks = draw(CHUNKS)
    planner = Planner(chunks, draw(st.text(max_size=3)), draw(st.integers(1, 4)), draw(st.integers(1, 12)))
    holders, done = draw(holders_of(chunks)), draw(bitmaps(chunks))
    flying = [chunk for chunk in done.missing() if draw(st.booleans())]
    hosts = [holder.host for holder in holders] + ["lost"]
    return planner, holders, done, [Assignment(chunk, draw(st.sampled_from(hosts))) for chunk in flying]


def had(holder: Holder, chunks: int) -> set[int]:
    return set(Bitmap.full(chunks) if holder.have is None else holder.have)


@given(situations())
def test_a_chunk_is_read_once_at_a_time_from_a_holder_of_it_and_no_place_stays_free_without_need(
    situation: Situation,
) -> None:
    planner, holders, done, flying = situation
    begun = planner.next(holders, done, flying)
    chunks = [read.chunk for read in [*flying, *begun]]
    assert len(set(chunks)) == len(chunks)
    by_name = {holder.host: holder for holder in holders}
    for read in begun:
        assert read.chunk not in done
        assert read.chunk in had(by_name[read.host], planner.chunks)
    reads = Counter(read.host for read in [*flying, *begun])
    assert all(reads[read.host] <= planner.per_holder for read in begun)
    assert not begun or len(flying) + len(begun) <= planner.total
    if len(flying) + len(begun) < planner.total:
        left = set(done.missing()) - set(chunks)
        for holder in holders:
            if reads[holder.host] < planner.per_holder:
                assert not left & had(holder, planner.chunks)


@given(situations())
def test_the_rarest_chunk_goes_first(situation: Situation) -> None:
    planner, holders, done, flying = situation
    begun = planner.next(holders, done, flying)
    taken = {read.chunk for read in flying}
    reads = Counter(read.host for read in flying)
    told = [holder.have for holder in holders if holder.have is not None]  # a holder of all tells no chunks apart
    for read in begun:
        open_now = {h.host: h for h in holders if reads[h.host] < planner.per_holder}
        has = {name: had(holder, planner.chunks) for name, holder in open_now.items()}
        offered = set().union(*has.values()) - set(done) - taken
        count = {chunk: sum(chunk in have for have in told) for chunk in offered}
        assert count[read.chunk] == min(count.values())
        best = min((h.distance, h.active + reads[h.host]) for h in open_now.values() if read.chunk in has[h.host])
        of = open_now[read.host]
        assert (of.distance, of.active + reads[of.host]) == best
        taken.add(read.chunk)
        reads[read.host] += 1


def test_receivers_diverge() -> None:
    """Sixteen receivers that see one publisher ask for almost all different chunks."""
    first = [Planner(1000, f"host-{n}", 8, 8).next([Holder("publisher")], Bitmap(1000), []) for n in range(16)]
    asked = Counter(read.chunk for reads in first for read in reads)
    assert sum(asked.values()) == 128
    assert len(asked) > 110


def test_the_same_question_has_the_same_answer() -> None:
    holders = [Holder("a", 0, Bitmap(100, 0xFFFF)), Holder("b", 1)]
    one, other = (Planner(100, "x", 4, 8).next(holders, Bitmap(100), []) for _ in range(2))
    assert one == other


def test_who_is_chosen_has_near_and_far_ones_and_differs_between_receivers() -> None:
    nothing = Bitmap(9)
    holders = [Holder(f"{word}-{n}", d, nothing) for d, word in enumerate(("near", "far")) for n in range(20)]
    chosen = [choose(holders, f"host-{n}", 8) for n in range(20)]
    for mine in chosen:
        assert len({holder.host for holder in mine}) == 8
        assert sum(holder.distance == 0 for holder in mine) >= 4
    assert any(holder.distance == 1 for mine in chosen for holder in mine)
    assert len({holder.host for mine in chosen for holder in mine}) > 30
    assert choose(holders, "a", 8, turn=1) != choose(holders, "a", 8)


def test_a_source_is_always_among_the_chosen() -> None:
    fetching = [Holder(f"h{n}", 0, Bitmap(9)) for n in range(200)]
    for source in (Holder("source", 1), Holder("source", 1, Bitmap(9, 1))):
        assert all(source in choose([*fetching, source], f"host-{n}", 8) for n in range(50))


@given(st.integers(0, 3), st.integers(1, 9))
def test_everybody_is_chosen_when_there_is_room(there: int, limit: int) -> None:
    holders = [Holder(f"h{n}", n % 2) for n in range(there)]
    assert len(choose(holders, "me", limit)) == min(there, limit)


@given(CHUNKS.flatmap(bitmaps), st.data())
def test_bitmaps_come_back_as_they_went_and_chunks_are_added_and_taken_out(bitmap: Bitmap, data: st.DataObject) -> None:
    assert Bitmap.decoded(bitmap.encoded(), bitmap.chunks) == bitmap
    assert sorted([*bitmap, *bitmap.missing()]) == list(range(bitmap.chunks))
    assert len(bitmap) == len(list(bitmap))
    assert bitmap.complete == (len(bitmap) == bitmap.chunks)
    chunk, before = data.draw(st.integers(0, bitmap.chunks - 1)), set(bitmap)
    bitmap.add(chunk)
    assert set(bitmap) == before | {chunk}
    bitmap.discard(chunk)
    assert set(bitmap) == before - {chunk}
    assert chunk not in bitmap


@pytest.mark.parametrize("text", ["", "?", "AAA=", "AAAAAA==", "/w==", "AA"])
def test_what_is_no_bitmap_of_these_chunks_is_refused(text: str) -> None:
    with refused("bad_bitmap", match="same release"):
        Bitmap.decoded(text, 6)


def test_of_equally_rare_chunks_those_that_are_near_come_first() -> None:
    near, far = Holder("near", 0, Bitmap(64, 0xFF)), Holder("far", 1, Bitmap(64, 0xFF00))
    reads = Planner(64, "me", 8, 8).next([far, near], Bitmap(64), [])
    assert {read.host for read in reads} == {"near"}
    rare = Holder("rare", 2, Bitmap(64, 1 << 63))
    common = [replace(holder, have=Bitmap(64, 0xFFFF)) for holder in (near, far)]
    assert Planner(64, "me", 8, 1).next([*common, rare], Bitmap(64), []) == [Assignment(63, "rare")]


def test_a_holder_that_has_nothing_new_is_left_for_another_after_a_while() -> None:
    patience = Patience()
    for look in range(LOOKS):
        assert patience.exhausted([]) is None, look
        patience.saw("idle", offers=False)
        patience.saw("useful", offers=look % 2 == 0)
    assert patience.exhausted(["idle"]) is None  # it is being read from
    assert patience.exhausted([]) == "idle"
    assert patience.exhausted([]) is None  # twice as long for the next
    patience.saw("complete", offers=False, grows=False)
    assert MOST_LOOKS >= 2 * LOOKS
    assert patience.exhausted(["idle"]) == "complete"
    patience.came()
    patience.forget("complete")
    assert patience.exhausted([]) == "idle"
    patience.forget("idle")
    assert patience.exhausted([]) is None


@st.composite
def racks_of_hosts(draw: st.DrawFn) -> list[tuple[str, str]]:
    """(rack, host) of up to 60, in any order."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    hosts = [(f"r{rack}", f"h{rack}-{n}") for rack, size in enumerate(sizes) for n in range(size)]
    return draw(st.permutations(hosts))


@given(racks_of_hosts())
def test_both_trees_reach_every_host_and_nobody_sends_more_than_it_receives(hosts: list[tuple[str, str]]) -> None:
    ways = {host: feeders([("r0", "source"), *hosts], "source", host) for _, host in hosts}
    for host, both in ways.items():
        for way in both:
            assert way[-1] == "source"
            assert len({host, *way}) == len(way) + 1
            assert len(way) <= 2 + 4 * len(hosts).bit_length()
    sent = Counter(both[tree][0] for both in ways.values() for tree in (0, 1))
    assert max(sent.values()) <= 2  # of halves
    assert sent["source"] == 2


@given(racks_of_hosts(), st.data())
def test_whoever_is_gone_all_others_are_fed_from_the_source(hosts: list[tuple[str, str]], data: st.DataObject) -> None:
    names = [host for _, host in hosts]
    gone = data.draw(st.sets(st.sampled_from(names)))
    for tree in (0, 1):
        ways = {host: feeders(hosts, "source", host)[tree] for host in names if host not in gone}
        above = {host: next(h for h in way if h not in gone) for host, way in ways.items()}
        for host in above:
            passed = {host}
            while (host := above.get(host, "")) not in ("", "source"):
                assert host not in passed
                passed.add(host)


@given(racks_of_hosts(), st.data())
def test_the_source_sends_no_more_where_one_host_is_gone(hosts: list[tuple[str, str]], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from([host for _, host in hosts]))
    ways = [feeders(hosts, "source", host) for _, host in hosts if host != gone]
    sent = Counter(next(host for host in way if host != gone) for both in ways for way in both)
    assert sent["source"] <= 2
    assert max(sent.values(), default=0) <= 3


@given(racks_of_hosts())
def test_each_tree_enters_a_rack_twice_at_most(hosts: list[tuple[str, str]]) -> None:
    rack = {host: rack for rack, host in hosts}
    entered: Counter[tuple[int, str]] = Counter()
    for _, host in hosts:
        for tree, way in enumerate(feeders(hosts, "source", host)):
            entered[tree, rack[host]] += rack.get(way[0]) != rack[host]
    assert max(entered.values()) <= 3  # once more where the order of the second tree begins in the middle of a rack
    assert sum(entered.values()) <= 2 * 2 * len(set(rack.values())) + 2


def test_all_hosts_compute_the_same_trees_whatever_order_they_hear_of_them_in() -> None:
    hosts = [(f"r{n // 4}", f"h{n:02}") for n in range(20)]
    assert all(feeders(hosts, "h03", h) == feeders(reversed(hosts), "h03", h) for _, h in hosts)
    assert feeders(hosts, "h03", "h03") == feeders(hosts, "h03", "another") == ()
    assert feeders([("", "a"), ("", "b")], "a", "b") == (("a",), ("a",))


@given(st.integers(1, 70))
def test_a_chunk_goes_down_one_tree(chunks: int) -> None:
    even, odd = halves(chunks)
    assert even & odd == 0
    assert even | odd == (1 << chunks) - 1
    assert Bitmap(chunks, even) == Bitmap(chunks, sum(1 << n for n in range(0, chunks, 2)))


def test_feeders_are_read_in_order_each_its_own_tree() -> None:
    first, second = Holder("first"), Holder("second", 0, Bitmap(64, 0xFFFF))
    reads = Planner(64, "me", 2, 8).next([first, second, Holder("other")], Bitmap(64), [], ("first", "second"))
    assert reads == [Assignment(n, ("first", "second")[n % 2]) for n in range(4)]


def test_chunks_of_a_tree_that_is_broken_or_behind_are_read_from_anybody() -> None:
    planner, fed = Planner(64, "me", 2, 8), ("first", "second")
    even, odd = halves(64)
    assert planner.loose(Bitmap(64), fed, late=False) == 0
    assert planner.loose(Bitmap(64), ("first", ""), late=False) == odd
    assert planner.loose(Bitmap(64, odd & (1 << 2 * LEAST_MARGIN + 2) - 1), fed, late=False) == even
    assert planner.loose(Bitmap(64, 1), fed, late=True) == even | odd
    assert planner.loose(Bitmap(64, odd | even >> 4 << 4), fed, late=True) == 0  # the last few are on their way
    reads = planner.next([Holder("first"), Holder("other")], Bitmap(64), [], ("first", ""))
    assert {read.host for read in reads if read.chunk % 2 == 0} == {"first"}
    assert "other" in {read.host for read in reads if read.chunk % 2}


def test_who_is_left_out_is_passed_over_on_the_way_up_and_who_has_nothing_is_not_waited_for() -> None:
    feeding, gone = Feeders((("a", "b", "source"), ("c", "source"))), set[str]()

    def now(seconds: float, chunk_s: float = 0.0) -> tuple[str, ...]:
        return feeding.now(lambda host: host not in gone, seconds, chunk_s)

    assert now(0.0) == ("a", "c")
    feeding.saw("c", PATIENCE_S, offers=True)
    assert now(1.5 * PATIENCE_S) == ("", "c")
    assert now(1.5 * PATIENCE_S, chunk_s=PATIENCE_S) == ("a", "c")  # nothing could have come by now
    gone.add("a")
    assert now(1.5 * PATIENCE_S) == ("b", "c")
    gone |= {"b", "source"}
    assert now(1.5 * PATIENCE_S) == ("", "c")
    assert Feeders().now(lambda host: True, 0.0) == ("", "")


def test_the_source_is_spared_while_others_have_something() -> None:
    feeding = Feeders((("a", "source"), ("source",)))
    assert feeding.spared(0.0) == ""
    feeding.saw("source", 0.0, offers=True)
    feeding.saw("a", 0.0, offers=False)
    assert feeding.spared(0.0) == ""
    feeding.saw("other", 1.0, offers=True)
    feeding.saw("other", 1.0 + PATIENCE_S, offers=False)
    assert feeding.spared(1.0 + PATIENCE_S) == "source"
    assert feeding.spared(1.1 + PATIENCE_S) == ""
    alone = Feeders()
    alone.saw("other", 0.0, offers=True)
    assert alone.spared(0.0) == ""


@given(st.integers(1, 40), st.data())
def test_what_the_source_lacks_is_read_from_who_has_it_and_nothing_else_is(chunks: int, data: st.DataObject) -> None:
    """A receiver that the source feeds in both trees waits for nobody: the rest of both trees stays the source's."""
    lacks = data.draw(st.integers(0, (1 << chunks) - 1))
    have = (1 << chunks) - 1 & ~lacks
    holders = [Holder("source", have=Bitmap(chunks, have)), Holder("writer", have=Bitmap(chunks, lacks))]
    planner = Planner(chunks, "me", chunks, chunks)
    begun = planner.next(holders, Bitmap(chunks), [], ("source", "source"), lacks=lacks)
    read = {host: sum(1 << read.chunk for read in begun if read.host == host) for host in ("source", "writer")}
    assert read == {"source": have, "writer": lacks}
