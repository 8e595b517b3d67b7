"""Turns of a scarce thing: the owners that wait get them one after the other, however many each of them waits for."""

from __future__ import annotations

import asyncio
from collections import deque


class NoTurn(Exception):
    """All places are taken, and no other owner waits for two more than this one."""


class Turns:
    """`at_once` turns, and `waiting` places to wait for one. Belongs to one event loop."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._free, self._most = at_once, waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def ask(self, owner: str) -> asyncio.Future[None]:
        """Done when the turn begins. NoTurn ends it where its place goes to an owner that has fewer.

        Raises NoTurn.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            turn.set_result(None)
            return turn
        if sum(map(len, self._waiting.values())) >= self._most:
            left = {one: deque(t for t in turns if not t.done()) for one, turns in self._waiting.items()}
            self._waiting = {one: turns for one, turns in left.items() if turns}  # without cancelled tasks
        if sum(map(len, self._waiting.values())) >= self._most:
            greediest = max(self._waiting.values(), key=len, default=deque())
            if len(greediest) < len(self._waiting.get(owner, ())) + 2:
                raise NoTurn
            greediest.pop().set_exception(NoTurn())
        self._waiting.setdefault(owner, deque()).append(turn)
        return turn

    def end(self) -> None:
        """The end of one turn, at which the next begins."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind all others
            if not turn.done():  # else its task is cancelled
                turn.set_result(None)
                return
        self._free += 1
