"""Conversations that keep their KV cache over swaps.

A request may share the blocks that the very same weights have computed from end to end (requests.py). With
`extra_args["hotswap"]["kv"]` it may share more: the blocks of its own session, whichever weights computed them.

    session    the name of the session: of one key, as the gateway makes it; empty: any request of the scope
    versions   at most so many weights may have a part in the cache of a prompt
    age_s      seconds that the oldest of it may be old

A `Course` says which weights computed which stretch of a prompt, as one request of the session left it. The next
request of the session looks for the longest hit along the courses that are known, and along the blocks of the weights
that run. From there on these weights compute, so there the course gets another stretch. Hashes of blocks in the first
stretch are vLLM's own: the session begins with the blocks that everybody shares, and what it computes under unchanged
weights is everybody's. In later stretches the hash of a block is mixed with the session and the course so far, so no
request that wants the blocks of one version ever finds them.

The look-up is the one that vLLM makes when it schedules a request, in the same step that gives the request its blocks:
a course cannot say more than the cache holds. A version that is withdrawn takes along every course from the stretch on
that it computed; a change of the cache's scales takes all.

Everything here runs on the engine core's own thread.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from weightsync.vllm_engine.engine_core.requests import (
    HASH_BYTES,
    PRIVATE,
    Weights,
    adapter_of,
    allows,
    go_private,
    namespace,
    namespace_of,
    wish_of,
)
from weightsync.vllm_engine.engine_core.routing import rekeyed

FIELD = "kv"  # of a request's wish
SESSIONS = 4096  # that are remembered; the one whose turn is longest ago goes first
COURSES = 4  # of a session: a conversation may branch

Key = tuple[str, str, str | None]  # session, scope and salt, adapter


class Stretch(NamedTuple):
    """From token `start` on, these weights computed the KV, when they ran as `version`."""

    start: int
    weights: str
    version: str


class Course(NamedTuple):
    """The stretches of a prompt, in order, the first from token 0. `born`: monotonic, of the oldest KV in it."""

    born: float
    stretches: tuple[Stretch, ...]

    @property
    def weights(self) -> int:
        """How many weights have a part in it."""
        return len({s.weights for s in self.stretches})

    def cut(self, tokens: int) -> Course:
        """The course of the first `tokens` tokens."""
        return Course(self.born, tuple(s for s in self.stretches if s.start < tokens) or self.stretches[:1])

    def then(self, tokens: int, weights: str, version: str) -> Course:
        """The course where these weights compute from `tokens` on."""
        kept = tuple(s for s in self.stretches if s.start < tokens)
        if kept and kept[-1].weights == weights:
            return Course(self.born, kept)
        return Course(self.born, (*kept, Stretch(tokens, weights, version)))

    def prompt(self, tokens: int, weights: str) -> list[tuple[int, str]]:
        """(end, version) over the first `tokens` tokens, up to the last that other weights than these computed."""
        ends = [*(s.start for s in self.stretches[1:]), tokens]
        parts = [(min(end, tokens), s) for end, s in zip(ends, self.stretches, strict=True) if s.start < tokens]
        while parts and parts[-1][1].weights == weights:
            parts.pop()
        return [(end, s.version) for end, s in parts]


class Sessions:
    """The courses of the sessions of one scheduler, under the weights that run."""

    def __init__(self, block_size: int) -> None:
        self.runs = Weights("")
        self._block_size = block_size  # tokens of a hash
        self._courses: OrderedDict[Key, list[Course]] = OrderedDict()  # of a session the last one first

    def __len__(self) -> int:
        return len(self._courses)

    def place(self, request: Any, hit: Callable[[], int]) -> None:
        """Give the request, of which nothing is computed, the course with the longest hit: `hit` says how many tokens
        the cache has of the request as it is hashed now."""
        wish, own, now = wish_of(request)[FIELD], self.runs.of(request), time.monotonic()
        key = self._key(request, wish)
        best = came = hashed = Course(now, (Stretch(0, own, self.runs.version),))
        if namespace_of(request) != own or getattr(request, "_hotswap_course", None) is not None:
            self._hash(request, key, best)
        most = hit()
        for course in list(self._usable(key, wish_of(request), wish["age_s"], now)):
            self._hash(request, key, hashed := course)
            if (found := hit()) <= most:
                continue
            grown = course.cut(found).then(found, own, self.runs.version)
            if grown.weights <= wish["versions"]:
                best, came, most = grown, course, found
        if hashed is best:
            self._follow(request, key, best, [])
        elif hashed is came:
            self._branch(request, key, came, best, most)
        else:
            self._hash(request, key, best)
        self._note(key, came, best)
        request._hotswap_prompt = best.prompt(min(most, request.num_prompt_tokens), own)

    def cross(self, request: Any) -> None:
        """Other weights have taken over the request, of which something is computed."""
        course: Course | None = getattr(request, "_hotswap_course", None)
        wish = wish_of(request).get(FIELD)
        if wish and course is not None and request._block_hasher is not None and namespace_of(request) != PRIVATE:
            computed = min(request.num_computed_tokens, request.num_tokens)
            grown = course.then(computed, self.runs.of(request), self.runs.version)
            if grown.weights <= wish["versions"]:
                key = self._key(request, wish)
                self._branch(request, key, course, grown, computed)
                rekeyed(request, computed // self._block_size)
                self._note(key, course, grown)
                return
        go_private(request, self._block_size)

    def withdraw(self, weights: set[str]) -> None:
        """Forget all that these weights computed, and what was computed behind it."""
        for key, courses in list(self._courses.items()):
            left = []
            for course in courses:
                first = next((s.start for s in course.stretches if s.weights in weights), None)
                if first is None:
                    left.append(course)
                elif first > 0:
                    left.append(course.cut(first))
            self._courses[key] = left
            if not left:
                del self._courses[key]

    def forget(self) -> None:
        """Nothing that is in the cache is of use any more."""
        self._courses.clear()

    def _usable(self, key: Key, wish: Mapping[str, Any], age_s: float, now: float) -> Iterator[Course]:
        for course in self._courses.get(key, ()):
            fit = next((s.start for s in course.stretches if not allows(wish, s.version)), None)
            if now - course.born <= age_s and fit != 0:
                yield course if fit is None else course.cut(fit)

    def _note(self, key: Key, came: Course, course: Course) -> None:
        """`course` takes the place of the one that it goes on with."""
        grown = course.stretches[: len(came.stretches)] == came.stretches
        gone = {course.stretches} | ({came.stretches} if grown else set())
        known = self._courses.get(key, [])
        born = min((each.born for each in known if each.stretches in gone), default=course.born)
        others = [each for each in known if each.stretches not in gone]
        self._courses[key] = [Course(min(born, course.born), course.stretches), *others][:COURSES]
        self._courses.move_to_end(key)
        while len(self._courses) > SESSIONS:
            self._courses.popitem(last=False)

    def _key(self, request: Any, wish: Mapping[str, Any]) -> Key:
        session = wish["session"] or repr(request.all_token_ids[: self._block_size])
        return session, request.cache_salt.split("|", 1)[1], adapter_of(request)

    def _hash(self, request: Any, key: Key, course: Course) -> None:
        """Hash all blocks of the request along this course."""
        request.cache_salt = namespace(course.stretches[0].weights, key[1])
        request.block_hashes.clear()
        self._follow(request, key, course, [])
        request.update_block_hashes()

    def _branch(self, request: Any, key: Key, course: Course, grown: Course, tokens: int) -> None:
        """The request, whose blocks are hashed along `course`, follows `grown` from `tokens` on."""
        plain = request._block_hasher.args[1] if len(course.stretches) > 1 else list(request.block_hashes)
        self._follow(request, key, grown, plain)
        del request.block_hashes[tokens // self._block_size :]
        request.update_block_hashes()

    def _follow(self, request: Any, key: Key, course: Course, plain: list[bytes]) -> None:
        """Blocks that have no hash yet get theirs along this course. `plain`: the hashes of vLLM of all that have."""
        request._hotswap_course = course
        request._hotswap_hasher = hasher = getattr(request, "_hotswap_hasher", request._block_hasher)
        if hasher is not None and len(course.stretches) > 1:  # None: prefix caching is off
            hasher = functools.partial(_mixed, hasher, plain, self._marks(key, course))
        request._block_hasher = hasher

    def _marks(self, key: Key, course: Course) -> list[tuple[int, bytes]]:
        """(first block, what its hash and later ones are mixed with) of each stretch but the first. A block in the
        middle of which other weights took over is of the later stretch."""
        marks, digest = [], hashlib.blake2b(repr(key).encode(), digest_size=HASH_BYTES)
        for stretch in course.stretches[1:]:
            digest.update(repr(stretch[:2]).encode())
            marks.append((stretch.start // self._block_size, digest.digest()))
        return marks


def _mixed(
    hasher: Callable[[Any], list[bytes]], plain: list[bytes], marks: list[tuple[int, bytes]], request: Any
) -> list[bytes]:
    """Hashes for the full blocks that have none yet. `plain`: vLLM's of all blocks, each of which builds on the one
    before; it grows."""
    known, request.block_hashes = request.block_hashes, plain
    try:
        plain.extend(hasher(request))
    finally:
        request.block_hashes = known
    found = []
    for block in range(len(known), len(plain)):
        mark = next((mark for first, mark in reversed(marks) if first <= block), b"")
        mixed = hashlib.blake2b(plain[block] + mark, digest_size=HASH_BYTES).digest()
        found.append(mixed if mark else plain[block])
    return found


def kv_of(request: Any) -> bool:
    """Whether the request may share what other weights have computed for its session."""
    return bool(wish_of(request).get(FIELD)) and not getattr(request, "_hotswap_afresh", False)


def of(scheduler: Any, runs: Weights) -> Sessions:
    """The scheduler's. The cache manager has them: it is asked for the blocks of a request."""
    manager = scheduler.kv_cache_manager
    found: Sessions | None = getattr(manager, "_hotswap_sessions", None)
    if found is None:
        found = manager._hotswap_sessions = Sessions(scheduler.hash_block_size)
    found.runs = runs
    return found


def placed(original: Callable[..., Any]) -> Callable[..., Any]:
    """`KVCacheManager.get_computed_blocks`, along the course of the request's session."""

    @functools.wraps(original)
    def get_computed_blocks(self: Any, request: Any, *args: Any) -> Any:
        """`args`: the longest hit, from vLLM 0.33 on."""
        sessions: Sessions | None = getattr(self, "_hotswap_sessions", None)
        if sessions is not None and kv_of(request):
            sessions.place(request, lambda: original(self, request, *args)[1])
        return original(self, request, *args)

    return get_computed_blocks
