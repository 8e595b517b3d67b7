"""Fairness between the keys of one class: start-time fair queueing.

Each key has a flow, a line of its own, served in the order it came. The start tag of a flow counts what it was given:
the cost of every request that left it, over its weight. The flow with the lowest tag goes next, and the tag of the
last one that went is the class's virtual time, from which a flow that was idle begins: nobody saves up, nobody owes.

Why this one (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996): it needs no knowledge of the rate at which
it is drained, which here changes with every batch and every swap. Deficit round robin (Shreedhar and Varghese, 1995) is
O(1) only if a quantum is worth the largest request, and costs here differ by four orders of magnitude. Costs are
estimates when a request leaves the line, so the true cost can be charged later (`settle`), as the virtual token counter
does with each token (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). For two flows that wait
without a break, the service they get over their weights never differs by more than
    max_cost_f / weight_f + max_cost_m / weight_m.

Push and pop are O(log flows); leaving the line, wherever one stands, and finding the longest line are O(1).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Item(Protocol):
    """A waiting request. `cost` is in tokens, `weight` at least 1."""

    @property
    def key(self) -> bytes: ...

    @property
    def weight(self) -> int: ...

    @property
    def cost(self) -> int: ...


T = TypeVar("T", bound=Item)


class Flow(Generic[T]):
    """One key's line. `start` is the start tag of its head, or its last finish tag while it is empty."""

    __slots__ = ("debt", "line", "serial", "start", "weight")

    def __init__(self) -> None:
        self.line: OrderedDict[T, None] = OrderedDict()
        self.weight = 1
        self.start = 0.0
        self.debt = 0  # what is to be charged beside the next request, in tokens; negative: a refund
        self.serial = 0  # of its entry in the heap; others are stale

    @property
    def level(self) -> int:
        """Length for its weight; changes by at most 1 when one enters or leaves."""
        return -(-len(self.line) // self.weight)


class Class(Generic[T]):
    """The flows of one priority."""

    def __init__(self) -> None:
        self._flows: dict[bytes, Flow[T]] = {}
        self._heap: list[tuple[float, int, Flow[T]]] = []
        self._serials = itertools.count(1)
        self._virtual = 0.0
        self._weights = 0  # of the flows that are not empty
        self._levels: list[dict[Flow[T], None]] = [{}]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, item: T) -> None:
        """To the end of its key's line."""
        flow = self._flows.get(item.key)
        if flow is None:
            flow = self._flows[item.key] = Flow()
        level = flow.level
        if not flow.line:
            flow.weight = item.weight
            flow.start = max(self._virtual, flow.start)
            self._enlist(flow)
            self._weights += flow.weight
        flow.line[item] = None
        self._size += 1
        self._level_changed(flow, level)

    def pop(self) -> T:
        """Takes the next item. The class must not be empty."""
        flow = self._next()
        item = next(iter(flow.line))
        self._virtual = flow.start
        flow.start = max(flow.start, flow.start + (item.cost + flow.debt) / flow.weight)
        flow.debt = 0
        heapq.heappop(self._heap)
        self.remove(item)
        if flow.line:
            self._enlist(flow)
        return item

    def remove(self, item: T) -> None:
        """`item` leaves the line uncharged."""
        flow = self._flows[item.key]
        level = flow.level
        del flow.line[item]
        self._size -= 1
        if not flow.line:
            flow.serial = 0
            self._weights -= flow.weight
        self._level_changed(flow, level)
        if not self._size:
            self._rest()

    def settle(self, key: bytes, more: int) -> None:
        """`key`'s served requests cost `more` tokens than was charged (or fewer, if negative)."""
        flow = self._flows.get(key)
        if flow is None:
            return
        if flow.line:
            flow.debt += more
        else:
            flow.start += more / flow.weight

    def ahead(self, key: bytes, weight: int) -> int:
        """About how many of those that wait here would go before a new item of `key`."""
        flow = self._flows.get(key)
        own = len(flow.line) if flow is not None else 0
        others = self._weights - (flow.weight if flow is not None and flow.line else 0)
        return min(self._size, own + (own + 1) * others // weight)

    def longest(self) -> tuple[bytes, T]:
        """The key with the longest line for its weight, and the last item of it. The class must not be empty."""
        flow = next(iter(self._levels[-1]))
        last = next(reversed(flow.line))
        return last.key, last

    def is_longest(self, key: bytes) -> bool:
        """Whether no line is longer for its weight than that of `key`."""
        return self._flows.get(key) in self._levels[-1]

    def _next(self) -> Flow[T]:
        while True:
            _, serial, flow = self._heap[0]
            if flow.serial == serial:
                return flow
            heapq.heappop(self._heap)

    def _enlist(self, flow: Flow[T]) -> None:
        flow.serial = next(self._serials)
        heapq.heappush(self._heap, (flow.start, flow.serial, flow))
        if len(self._heap) > 2 * len(self._flows) + 16:  # most are stale: of flows whose only request left
            self._heap = [entry for entry in self._heap if entry[2].serial == entry[1]]
            heapq.heapify(self._heap)

    def _level_changed(self, flow: Flow[T], before: int) -> None:
        after = flow.level
        if before == after:
            return
        if before:
            del self._levels[before][flow]
        if after == len(self._levels):
            self._levels.append({})
        if after:
            self._levels[after][flow] = None
        if len(self._levels) > 1 and not self._levels[-1]:
            self._levels.pop()

    def _rest(self) -> None:
        """Sets all tags back, as no request waits: the next one finds all keys equal."""
        self._flows.clear()
        self._heap.clear()
        self._virtual = 0.0
