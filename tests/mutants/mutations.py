# ruff: noqa: E501 - lines of other files, as they are
"""The list. Each mutation changes what the code means; the tests beside it must fail. One that no test can notice says
why in one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old`, which `file` holds once, becomes `new`. `tests`: files that must notice. `explained`: why none can."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    explained: str = ""


def of(file: str, *tests: str, changes: list[tuple[str, ...]]) -> list[Mutation]:
    """Mutations of one file: (old, new) each, or (old, new, why no test can notice it)."""
    return [Mutation(file, old, new, tests, *why) for old, new, *why in changes]


WS, GW, TR = "tests/weightsync/", "tests/server/test_gateway_", "tests/trainer/"

MUTATIONS: list[Mutation] = [
    *of("weightsync/swap/state.py", WS + "test_swap_state.py", changes=[
        ("if waiting and view.now >= swap.deadline:", "if waiting and view.now > swap.deadline:"),
        ("        and instance.active_epoch == 0\n", ""),
        ("    if view.target_state != \"ready\":\n        return abort(", "    if view.target_state is None:\n        return abort("),
        ("previous = before.previous  # committing", "previous = before.version  # committing"),
        ("if view.now >= overdue:", "if view.now > overdue:"),
        ("epoch=before.epoch + 1 if before is not None else 1,", "epoch=before.epoch if before is not None else 1,"),
        ("if swap.on_lost == \"continue\" and left and swap.canary not in lost:", "if swap.on_lost == \"continue\" and left:"),
        ("i.active_epoch < active.epoch and i.state in PARTICIPATING]", "i.active_epoch < active.epoch]"),
        ("        found.append(keys.target)\n", "        pass\n"),
        ("instance.state == \"STAGED\" and instance.staged_version == swap.target", "instance.state == \"STAGED\""),
    ]),
    *of("weightsync/swap/agent_state.py", WS + "test_agent_state.py", changes=[
        ("    if record.state in OUT_FOR_GOOD:\n        return Rest()\n", ""),
        ("return not isinstance(action, Rest) and", "return"),
        ("if view.drained != swap.id:\n            return Drain(swap)\n    return Flip(active)", "return Flip(active)"),
        ("return not fingerprint or not expected or", "return not fingerprint or"),
        ("if isinstance(action, Flip) and record.staged_version != action.active.version:", "if isinstance(action, Flip):"),
    ]),
    *of("weightsync/swap/agent.py", WS + "test_agent.py", changes=[
        ("            staging.task.cancel()\n        if staging.unwanted", "        if staging.unwanted"),
        ("return self._staging.task.done() and not self._staging.unwanted", "return self._staging.task.done()"),
    ]),
    *of("weightsync/swap/activation.py", WS + "test_activation.py", changes=[
        ("{**(fence or {}), key: found.mod_revision}", "{key: found.mod_revision}"),
        ("{**(fence or {}), key: found.mod_revision}", "{**(fence or {})}"),
    ]),
    *of("weightsync/store/sqlite_db.py", WS + "test_store.py", changes=[
        ("if (found := row[0] if row else 0) != expected:", "if (found := row[0] if row else 0) < expected:"),
        ("            for lease in set(leases.values()):\n                self._require_lease(lease)\n", ""),
        ("SET expires = ttl + ? WHERE id = ?", "SET expires = expires + 0 * ? WHERE id = ?"),
        ("revision = self._revision() + 1\n", "revision = self._revision() + 2\n"),
        ("        if row is None:\n            return False\n        self._record(\"delete\"", "        self._record(\"delete\""),
    ]),
    *of("weightsync/digests/fingerprint.py", WS + "test_fingerprint.py", changes=[
        ("if (other := boxes.setdefault(part.box, part)).sum != part.sum:", "if False and (other := boxes.setdefault(part.box, part)):"),
        ("or _overlap(unique)", ""),
        ("row, col = divmod(self._at, self._cols)", "row, col = 0, self._at % self._cols"),
        ("for name in sorted(checksums))", "for name in checksums)"),
    ]),
    *of("weightsync/digests/verify.py", WS + "test_verify.py", changes=[
        ("if checksum != entry.checksum:", "if False:"),
        ("        slot.verify(name)\n", ""),
    ]),
    *of("weightsync/delta/codec.py", WS + "test_delta.py", changes=[
        ("if places[-1] >= elements:", "if places[-1] > elements:"),
        ("if (size := zstandard.frame_content_size(data)) != nbytes:", "if (size := zstandard.frame_content_size(data)) > nbytes:"),
        ("if start != len(body):", "if start > len(body):"),
        ("if end > len(body):", "if end > len(body) + 1:"),
        ("or ends[-1] != len(numbers) - 1:", ":"),
        ("np.diff(places, prepend=-1) - 1", "np.diff(places, prepend=0)"),
    ]),
    *of("weightsync/retention.py", WS + "test_coordinator.py", WS + "test_parts.py", changes=[
        ("needed |= {active.version, active.previous}", "needed |= {active.version}"),
        ("return [v for v in candidates[spare:]", "return [v for v in candidates[spare + 1:]"),
    ]),
    *of("trainer/experience.py", TR + "test_experience.py", changes=[
        ("self.feed.drawn = max(self.feed.drawn, consumed)", "self.feed.drawn = consumed"),
        ("            self._taken.sort(key=lambda rollout: rollout.draw.number)  # which answer was faster must not count\n", ""),
        ("if length > self._longest:", "if length >= self._longest:"),
        ("if length > self._longest:", "if length > self._longest + 1:"),
        ("return len(part) >= c.micro_batch * c.parallel.data", "return len(part) > c.micro_batch * c.parallel.data"),
        ("return len(part) >= c.micro_batch * c.parallel.data", "return len(part) >= c.micro_batch"),
    ]),
    *of("trainer/algorithms/correction.py", TR + "algorithms/test_policy.py", changes=[
        ("accepted & (lag <= config.max_lag)", "accepted & (lag < config.max_lag)"),
        ("weights = weights * config.lag_decay**lag", "weights = weights * config.lag_decay"),
        ("weights.clamp(config.low, config.high)", "weights.clamp(0.0, config.high)"),
    ]),
    *of("trainer/algorithms/advantages.py", TR + "algorithms/test_policy.py", changes=[
        ("(total - reward) / others for", "total / others for"),
        ("+ gamma * lam * following)", "+ gamma * following)"),
    ]),
    *of("trainer/batch/packing.py", TR + "batch/test_packing.py", changes=[
        ("place = bisect.bisect_left(room, (lengths[index], -1))", "place = bisect.bisect_left(room, (lengths[index] + 1, -1))"),
        ("if lengths and max(lengths) > max_tokens:", "if lengths and max(lengths) >= max_tokens:"),
        ("count = -(-len(bins) // ranks) * ranks", "count = len(bins)"),
    ]),
    *of("trainer/schedules/asynchronous.py", TR + "schedules/test_asynchronous.py", changes=[
        ("most = (max_lag + 1) * batch", "most = (max_lag + 2) * batch"),
        ("min(self._buffer, room, steps_left * self.batch)", "min(self._buffer, room)"),
        ("deadline = pending.version + self.max_lag\n", "deadline = pending.version + self.max_lag + 1\n"),
    ]),
    *of("server/gateway/fleet/routing.py", GW + "routing.py", changes=[
        ("record.active_epoch == active.epoch - 1", "record.active_epoch <= active.epoch"),
        ("return record.active_version == active.version and (not known or record.fingerprint == active.fingerprint)", "return record.active_version == active.version"),
        ("\"STAGING\": 1}", "\"STAGING\": 0}"),
        ("+ SPREAD * sum(loads) / len(loads)", "+ SPREAD * sum(loads)"),
    ]),
    *of("server/gateway/proxy/failover.py", GW + "failover.py", changes=[
        ("if limit_s and now - since > limit_s:", "if now - since > limit_s:"),
        ("return version if served or mode != \"any\" else None", "return version"),
    ]),
]  # fmt: skip
