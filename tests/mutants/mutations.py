# ruff: noqa: E501 - lines of other files, as they are
"""The list. Each mutation changes what the code means; the tests beside it must fail. One that no test can notice says
why in one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old`, which `file` holds once, becomes `new`. `tests`: what must notice, files or `file::test`. `explained`: why
    nothing can."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    explained: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.old.strip()[:80]!r} -> {self.new.strip()[:80]!r}"


def of(file: str, *tests: str, changes: list[tuple[str, ...]]) -> list[Mutation]:
    """Mutations of one file: (old, new) each, or (old, new, why no test can notice it)."""
    return [Mutation(file, old, new, tests, *why) for old, new, *why in changes]


WS, GW, TR = "tests/weightsync/", "tests/server/gateway/", "tests/trainer/"
ANSWERS, FOLLOW = "tests/server/answers/", "tests/server/follow/"
JOBS = TR + "api/finetuning/"
GATEWAY = "server/gateway/"
ACCESS, QUEUE, FLEET, WIRE = (f"{GATEWAY}{room}/" for room in ("access", "queue", "fleet", "wire"))
KEYS = [
    f"{GW}access/test_keys.py::test_{test}"
    for test in (
        "nothing_is_open_before_the_store_was_read",
        "records_that_cannot_be_read_close_it_while_they_are_there",
        "a_key_without_its_door_record_closes_whatever_became_of_it",
        "a_key_works_until_the_moment_it_expires",
        "the_old_key_ends_with_its_grace_or_with_the_record",
        "scopes_and_standing_are_told_to_who_has_the_key",
        "a_store_that_has_lost_its_records_opens_nothing",
    )
]
SILENCE_AND_NEEDS = [
    f"{GW}fleet/test_failover.py::test_{test}"
    for test in (
        "silence_counts_from_when_it_left_the_store",
        "what_the_client_asked_for_holds_again_where_any_version_may_go_on",
    )
]

MUTATIONS: list[Mutation] = [
    *of(ACCESS + "keys.py", *KEYS, changes=[
        ("not (self._required or unread or self._closed)", "not (self._required or self._closed)"),
        ("principal.until <= time.time()", "principal.until < time.time()"),
        ("min(record.old_until, record.expires_at or record.old_until)", "record.old_until"),
        ("if door is None or record.revoked_at is None)", "if record.revoked_at is None)"),
        ("(self._closed if door is None else not door.open)", "(False if door is None else not door.open)"),
    ]),
    *of("server/answers/parse.py", ANSWERS + "test_parse.py", changes=[
        ("if told and (last or not choice.token_ids):", "if told:"),
        ("for event in answer.split(b\"\\n\\n\")[:-1]:", "for event in answer.split(b\"\\n\\n\"):"),
        ("record.choices.sort(key=lambda choice: choice.index)", "pass"),
    ]),
    *of("server/answers/measures.py", ANSWERS + "test_measures.py", changes=[
        ("if 400 <= about.status < 500:", "if 400 < about.status < 500:"),
        ("tokens > len(answer.choices)", "tokens >= len(answer.choices)"),
        ("text[:OPENING]", "text"),
    ]),
    *of("server/answers/log.py", ANSWERS + "test_log.py", changes=[
        (" and moment <= self.before", ""),
        ("if len(later) > len(marks):", "if False:"),
        ("fcntl.flock(self._fd, fcntl.LOCK_EX)", "pass"),
        ("whole = content[: content.rfind(b\"\\n\") + 1]", "whole = content"),
        ("total <= bounds.max_bytes:", "total < bounds.max_bytes:"),
        ("(self.all_keys and principal.digest == ANONYMOUS.digest)", "self.all_keys"),
        ("if answer.choices and answer.about.status in (200, 499):", "if answer.choices:"),
    ]),
    *of("server/answers/reading.py", ANSWERS + "test_reading.py", changes=[
        ("said[at].time <= record.time:", "said[at].time > record.time:"),
        ("feedback = said.get((record.id, record.about.key, record.about.key_id))", "feedback = next((f for at, f in said.items() if at[0] == record.id), None)"),
    ]),
    *of("server/answers/feedback.py", GW + "test_feedback.py::test_only_the_key_that_asked_and_admins_may_rate", changes=[
        ("owner = self._owners.get(answer_id) if digest is None else digest", "owner = self._owners.get(answer_id)"),
    ]),
    *of("server/answers/feedback.py", GW + "test_feedback.py::test_feedback_finds_the_gateway_that_answered", changes=[
        ("await self._store.txn({kv.key: kv.mod_revision}, {kv.key: None})", "pass"),
        ("known = self._recent.find(passed.posted.id, passed.digest)", "known = self._recent.find(passed.posted.id, None)"),
    ]),
    *of("server/answers/desk.py", GW + "test_capture.py::test_each_consumer_has_a_bound_of_its_own", changes=[
        (">= consumer.most:", "> consumer.most:"),
    ]),
    *of(WIRE + "capture.py", GW + "test_capture.py::test_what_is_too_large_is_dropped_and_the_answer_goes_on", changes=[
        (" or memory.used + size > memory.limit:", ":"),
        ("self._charged + size > memory.per_answer or ", ""),
    ]),
    *of(GATEWAY + "exchange.py", GW + "test_capture.py::test_what_a_refused_request_got_is_no_part_of_it", changes=[
        ("            self._capture.restart()\n", ""),
    ]),
    *of("trainer/data/answers.py", TR + "data/test_answers.py", changes=[
        ("index.said[at][\"time\"] <= record[\"time\"]:", "index.said[at][\"time\"] > record[\"time\"]:"),
        (" and choice[\"finish_reason\"] not in CUT", ""),
        ("and said[\"score\"] > self.liked.get(prompt, (0.0, \"\"))[0]:", "and True:"),
        ("if not chosen or chosen == rejected:", "if not chosen:"),
        ("self.first.setdefault(_digest(_prompt(record, 0)), _key(record))", "self.first[_digest(_prompt(record, 0))] = _key(record)"),
    ]),
    *of(ACCESS + "roles.py", GW + "access/test_roles.py", changes=[
        ('template.fullmatch(asked)), "admin")', 'template.fullmatch(asked)), "viewer")'),
    ]),
    *of(ACCESS + "oidc.py", GW + "access/test_oidc.py", changes=[
        ("if algorithm not in self._settings.allowed:", "if algorithm is None:"),
        ("if document.get(\"issuer\") != self._issuer:", "if not document.get(\"issuer\"):"),
        ("if role not in principal.scopes:", "if not principal.scopes:"),
        ("audience=self._audience,", "audience=None,"),
        ("issuer=self._issuer,", "issuer=None,"),
        ("time.monotonic() - self._tried >= REFETCH_S", "time.monotonic() - self._tried >= 0"),
        ("time.monotonic() - self._fetched > STALE_S", "self._fetched < 0"),
    ]),
    *of(ACCESS + "limits.py", GW + "access/test_quota.py", changes=[
        ("            quota.asked += needed\n", ""),
        ("if quota.used + needed > quota.allotted:", "if quota.used + needed >= quota.allotted:"),
        ("if needed > quota.limit:", "if needed >= quota.limit:"),
        ("elsewhere + needed <= quota.limit", "elsewhere + needed < quota.limit"),
        ("quotas, self._quotas = self._quotas, []", "quotas = self._quotas"),
        ("                    self._taken[at] += more\n", ""),
        ("self.correct(taken_at, spent - taken)", "self.correct(self.now, spent - taken)"),
        ("quota.seconds_until(quota.used + needed - quota.allotted)", "quota.seconds_until(needed)"),
    ]),
    *of(ACCESS + "limits.py", GW + "access/test_quota.py", changes=[
        ("elif self.now - taken_at < SLOTS:", "elif self.now - taken_at <= SLOTS:"),
        ("            if units <= 0:\n", "            if units < 0:\n"),
    ]),
    *of(ACCESS + "limits.py", GW + "access/test_quota.py", GW + "access/test_limits.py", changes=[
        ("max(_number(asked.n), _number(asked.best_of), 1)", "max(_number(asked.n), 1)"),
        ("if status < 400 or status == 499 else 0, 0", "if status < 400 else 0, 0"),
        ("usage.prompt_tokens if usage.exact else self.prompt,", "usage.prompt_tokens,"),
        ("    if most > bound:\n", "    if most >= bound:\n"),
        ("(default is not None and default <= bound)", "default is not None"),
        ("max(1, texts + raw.count(b\"[\") - 1)", "max(1, texts + raw.count(b\"[\"))"),
    ]),
    *of(ACCESS + "sharing.py", GW + "access/test_shares.py", changes=[
        ("return max(held, min(target, self._room(resource, use.limit)))", "return max(held, target)"),
        ("by_remainder[: units - sum(parts.values())]:", "by_remainder[:0]:"),
        ("self._held[resource] = use.used\n        return True", "pass\n        return True"),
        ("self._held |= {r: min(units, before[r]) for r, units in wanted.items()}", "self._held |= wanted"),
        (" and _lasts(r))", ")"),
        ("if self.state == \"active\" else 0", "if self.state != \"left\" else 0"),
        ("min(self._held[resource], limit // len(self._allows_for))", "min(self._held[resource], limit)"),
        ("welcome = all(", "welcome = any("),
    ]),
    *of(ACCESS + "sharing.py", GW + "access/test_shares.py", changes=[
        ("store.txn({USAGE_ROUND: self._round[0]}, puts", "store.txn({}, puts"),
        ("self._before = self._division\n            self.entered", "self.entered"),
    ]),
    *of(QUEUE + "flows.py", GW + "queue/test_queue.py", changes=[
        ("max(flow.start, flow.start + (item.cost + flow.debt) / flow.weight)", "flow.start + (item.cost + flow.debt) / flow.weight"),
        ("flow.start = max(self._virtual, flow.start)", "flow.start = self._virtual"),
        ("(item.cost + flow.debt) / flow.weight)", "item.cost + flow.debt)"),
        ("flow.debt += more", "flow.debt = more"),
        ("own + (own + 1) * others // weight", "own + own * others // weight"),
    ]),
    *of(QUEUE + "line.py", GW + "queue/test_queue.py", changes=[
        ("if self.bytes + ticket.size > self._settings.max_bytes:", "if self.bytes + ticket.size >= self._settings.max_bytes:"),
        ("return min(waiting, key=lambda lines: lines.served)", "return waiting[0]"),
        ("if ticket.priority == last and lines.is_longest(ticket.key):", "if ticket.priority == last:"),
        ("if now + wait_s > ticket.deadline:", "if wait_s > ticket.deadline:"),
        ("min(ticket.deadline, now + self._settings.max_wait_s)", "now + self._settings.max_wait_s"),
        ("while self.next_deadline() <= now:", "while self.next_deadline() < now:"),
        ("        if not ahead:\n            return  # who", "        if False:\n            return  # who"),
    ]),
    *of(FLEET + "instance.py", GW + "queue/test_queue.py", changes=[
        ("min(self._size, max(in_flight, self._size / 2)) * SHRINK", "self._size * SHRINK"),
        ("preempted or signals.num_requests_waiting", "signals.num_requests_waiting"),
    ]),
    *of(QUEUE + "line.py", GW + "queue/test_queue.py", changes=[
        ("max(self._seconds / self._departures, (now - self._since) / MEMORY)", "(self._seconds / self._departures)"),
    ]),
    *of(QUEUE + "gate.py", GW + "queue/test_admission_queue.py", changes=[
        ("            if self._has_room(ticket.need):", "            if True:"),
        ("instance.working < instance.window.limit", "instance.working <= instance.window.limit"),
    ]),
    *of(FLEET + "routing.py", GW + "fleet/test_routing.py", changes=[
        ("record.active_epoch == active.epoch - 1", "record.active_epoch <= active.epoch"),
        ("return record.active_version == active.version and (not known or record.fingerprint == active.fingerprint)", "return record.active_version == active.version"),
        ("\"STAGING\": 1}", "\"STAGING\": 0}"),
        ("+ SPREAD * sum(loads) / len(loads)", "+ SPREAD * sum(loads)"),
        ("+ 2 * (c.failed_at > since)", "+ (c.failed_at > since)"),
    ]),
    *of(FLEET + "affinity.py", GW + "fleet/test_affinity.py", changes=[
        ("return SIZES[k] / hint.size", "return 1.0"),
        ("if len(self._young) >= self._limit:", "if len(self._young) > self._limit:"),
    ]),
    *of(FLEET + "affinity.py", GW + "fleet/test_prefixes.py", changes=[
        ("if now - self._aged_at >= SENT_S:", "if now - self._aged_at > SENT_S:"),
        ("if since == _HELD and prefix not in kept]", "if since == _HELD]"),
        ("        self.held -= since == _HELD\n", ""),
        ("if self.held > MOST_HELD:", "if False:"),
        ("keep = (_HELD, self._generation)", "keep = (self._generation,)"),
    ]),
    *of("server/instance/prefixes.py", "tests/server/instance/test_prefixes.py", changes=[
        ("whole = not self._count - len(self._changes) <= told <= self._count", "whole = not told <= self._count"),
        ("self._ranks.get((version, prefix), 0) & ~(1 << rank)", "0"),
        ("if name == self._name and", "if"),
        ("if time.monotonic() >= self._fresh_until:", "if True:"),
    ]),
    *of("weightsync/vllm_engine/prefixes.py", WS + "vllm_engine/test_prefixes.py", changes=[
        ("if known is not None and (key in self._held or known == block):", "if known is not None and known == block:"),
        ("            self._blocks.move_to_end(key)\n", ""),
        ("if block in self.holdings and not self._holds(block):", "if block in self.holdings:"),
        ("if events := self._manager.take_events():", "if events := ():"),
        (" - len(replay_of(request).get(\"tokens\", ()))", ""),
    ]),
    *of(FLEET + "instance.py", GW + "fleet/test_health.py", changes=[
        ("if self.closed or now < self.until:", "if self.closed:"),
        ("asked >= s.min_requests and self._failures", "self._failures"),
        ("if self.closed and now - self.recovered_at", "if now - self.recovered_at"),
    ]),
    *of(FLEET + "retries.py", GW + "fleet/test_health.py", changes=[
        ("or lost_before >= LOSSES:", "or lost_before > LOSSES:"),
        ("or route in NEVER_AGAIN or", "or"),
        ("        self._tokens -= 1.0\n", ""),
        ("min(most, self._tokens + self.share * new + MIN_PER_S * passed)", "self._tokens + self.share * new + MIN_PER_S * passed"),
    ]),
    *of(FLEET + "view.py", GW + "fleet/test_health.py", GW + "fleet/test_fleet.py", changes=[
        ("return out < most and any(i.health.well for i in others)", "return out < most"),
        ("any(i not in tried and i.health.admits(now) for i in meets)", "any(i not in tried for i in meets)"),
        ("candidates = well or candidates  #", "candidates = well  #"),
    ]),
    *of(GATEWAY + "exchange.py", GW + "fleet/test_losses.py", changes=[
        ("if relay.refused == LOST or (relay.refused and self._resent):", "if relay.refused == LOST:"),
        ("or self._losses >= retries.LOSSES:", "or self._losses > retries.LOSSES:"),
    ]),
    *of(GATEWAY + "exchange.py", *(f"{GW}wire/test_cancel.py::test_{test}" for test in ("how_long_each_side_may_stand_still", "a_kept_connection_that_ends_late_was_not_closed_already")), changes=[
        ("elif self._pooled and time.monotonic() - self.last_progress < STALE_S:", "elif self._pooled:"),
        ("if self._paused and idle > stalled_client_s:", "if idle > stalled_client_s:"),
        ("elif not self._paused and self._link is not None and idle", "elif self._link is not None and idle"),
    ]),
    *of(GATEWAY + "exchange.py", f"{GW}queue/test_admission_queue.py::test_what_an_answer_really_cost_is_charged_to_its_key", changes=[
        ("more = cost.used(self.usage, status) - cost.total", "more = cost.used(self.usage, status)"),
    ]),
    *of(GATEWAY + "exchange.py", GW + "fleet/test_failover.py", changes=[
        ("self.request.need = self._continuation.need\n", "pass\n"),
    ]),
    *of(FLEET + "retries.py", *SILENCE_AND_NEEDS, changes=[
        ("if limit_s and now - since > limit_s:", "if now - since > limit_s:"),
        ("own = need if last is None else last.own_need", "own = need"),
        ("now - max(since, instance.left_at) > GONE_S", "now - since > GONE_S"),
    ]),
    *of(FLEET + "retries.py", GW + "fleet/test_failover.py", changes=[
        ("return version if served or mode != \"any\" else None", "return version"),
    ]),
    *of(WIRE + "journal.py", GW + "wire/test_journal.py", changes=[
        ("if self._charged + size > memory.per_stream", "if self._charged + size >= memory.per_stream"),
        ("or memory.used + size > memory.limit:", "or memory.used + size >= memory.limit:"),
        ("last.version == version and last.end == start", "last.end == start"),
        ("        elif not self._ids:\n", "        else:\n"),
        ("piece.rfind(b\"\\n\\n\") + 2", "piece.find(b\"\\n\\n\") + 2"),
        ("self._memory.used -= self._charged - self._request_bytes", "self._memory.used -= self._charged"),
        ("if not self._ids or self.finish is not None or any(", "if not self._ids or any("),
    ]),
    *of(FLEET + "retries.py", GW + "fleet/test_hold.py", changes=[
        ("if len(self._timers) >= self._limit:", "if len(self._timers) > self._limit:"),
        ("delay = min(left, RETRY_S) if soon else left", "delay = left"),
    ]),
    *of(FLEET + "routing.py", GW + "test_admission.py", changes=[
        ("version >= self.min_version)", "version > self.min_version)"),
    ]),
    *of(GATEWAY + "terms.py", GW + "test_admission.py", changes=[
        ("if asked.priority < principal.priority:", "if asked.priority <= principal.priority:"),
        ("return \"same\" if chosen == \"any\" and self.uncrossed else chosen", "return chosen"),
    ]),
    *of("server/instance/grammars/bounds.py", "tests/server/instance/test_grammars.py", changes=[
        ("if depth > MOST_DEPTH:", "if depth >= MOST_DEPTH:"),
        ("        if nodes > MOST_NODES:", "        if nodes >= MOST_NODES:"),
        ("    return inner\n", "    return repeats\n"),
        ("low if high >= int(sre.MAXREPEAT) else high", "low"),
        ("check_pattern(node[\"pattern\"], repeats)", "check_pattern(node[\"pattern\"])"),
        ("for part in body.split(\"|\") if", "for part in [body] if"),
        ("            left += first.get(rule, ())\n", "            pass\n"),
        ("        seen.add(reference)\n", "        seen = {reference}\n"),
    ]),
    *of("server/instance/requests.py", "tests/server/instance/test_vocabulary.py", changes=[
        ("max(ids) < vocabulary:", "max(ids) <= vocabulary:"),
        ("if ids and not 0 <= min(ids) <= max(ids)", "if ids and not max(ids)"),
        ("(prompt.get(\"encoder_prompt\"), prompt.get(\"decoder_prompt\"))", "(prompt.get(\"decoder_prompt\"),)"),
        ("place.offset + place.length)}", "place.offset + place.length + 1)}"),
    ]),
    *of("weightsync/control/state.py", WS + "control/test_state.py", changes=[
        ("if waiting and view.now >= swap.deadline:", "if waiting and view.now > swap.deadline:"),
        ("(instance.active_version, instance.active_epoch) == (asked.version, asked.epoch)", "instance.active_version == asked.version"),
        ("return runs and instance.state == \"COMMITTING\"", "return runs"),
        ("instance.active_epoch >= active.epoch and instance.state != \"COMMITTING\"", "instance.active_epoch >= active.epoch"),
        ("ends = replace(active, trial=None) if", "ends = active if"),
        ("    if view.active is None or view.active.trial is None:\n", "    if view.active is None:\n"),
        ("    if view.target_state != \"ready\":\n        return abort(", "    if view.target_state is None:\n        return abort("),
        ("previous = before.previous  # committing", "previous = before.version  # committing"),
        ("if view.now >= overdue:", "if view.now > overdue:"),
        ("if swap.on_lost == \"continue\" and left and whole and swap.canary not in lost:", "if swap.on_lost == \"continue\" and left and whole:"),
        ("not confirmed(i, active) and i.state in PARTICIPATING]", "not confirmed(i, active)]"),
        ("        found.append(keys.target)\n", "        pass\n"),
        ("instance.state == \"STAGED\" and instance.staged_version == target", "instance.state == \"STAGED\""),
    ]),
    *of("weightsync/control/agent_state.py", WS + "control/test_agent_state.py", changes=[
        ("    if record.state in OUT_FOR_GOOD:\n        return Rest()\n", ""),
        ("return not isinstance(action, Rest) and", "return"),
        ("        if view.drained != mine.id:\n            return Drain(mine)\n", ""),
        ("    if active.trial is not None and mine is None:\n", "    if False:\n"),
        ("return active.trial is not None or _nearest(", "return _nearest("),
        (" or not runs(record, active)):", "):"),
        ("return \"COMMITTING\" if active is not None and active.trial is not None else \"SERVING\"", "return \"SERVING\""),
        ("return not fingerprint or not expected or", "return not fingerprint or"),
        ("if isinstance(action, Flip) and record.staged_version != action.active.version:", "if isinstance(action, Flip):"),
    ]),
    *of("weightsync/control/agent.py", WS + "control/test_agent.py", changes=[
        ("            staging.task.cancel()\n        if staging.unwanted", "        if staging.unwanted"),
        ("return self._staging.task.done() and not self._staging.unwanted", "return self._staging.task.done()"),
        ("if retry_s is None and (self._record != record or any(task.done() for task in under_way)):", "if False:"),
    ]),
    *of("weightsync/control/state.py", WS + "control/test_coordinator.py", changes=[
        ("        found.append(keys.instances)\n", "        pass\n"),
    ]),
    *of(ACCESS + "approvals.py", GW + "admin/test_approvals.py", changes=[
        ("if not needed & set(rule.approvals):", "if True:"),
        ("if pending.digest == by.digest.hex():", "if pending.who == by.reason:"),
        ("if time.time() < pending.until:", "if pending.until:"),
        ("            compares[approval.key] = approval.revision\n", ""),
    ]),
    *of("server/gateway/admin/weights.py", GW + "admin/test_approvals.py", changes=[
        ("body.version == now.previous else", "body.version else"),
    ]),
    *of("weightsync/format/signing.py", WS + "format/test_signing.py", changes=[
        ("if not part.signature:", "if False:"),
        ("if signed.get(\"name\") != _name(model, part.name):", "if not signed.get(\"name\"):"),
        ("if found != signed.get(\"sha256\"):", "if not found:"),
        ("until <= datetime.datetime.now(datetime.UTC)", "until is None"),
        ("        except InvalidSignature:\n            return False", "        except InvalidSignature:\n            return True"),
        ("for part in (base, *record.parts):", "for part in (base,):"),
    ]),
    *of("weightsync/memory/parts.py", WS + "format/test_signing.py", changes=[
        ("        signature=base.signature,\n", ""),
    ]),
    *of("server/instance/sidecar.py", "tests/server/instance/test_sidecar.py", changes=[
        ("        await asyncio.to_thread(self._trust.check, self._config.model, places[self._host])\n", ""),
    ]),
    *of("weightsync/control/chain.py", WS + "control/test_chain.py", changes=[
        ("if conflict.key != HEAD:", "if conflict.key == HEAD:"),
        ("linked = entry.after(head)", "linked = entry.after(HeadRecord(head.number))"),
        ("if entry.digest != entry.expected:", "if not entry.digest:"),
        ("if entry.previous != last.digest:", "if not entry.previous and number > 1:"),
        ("if number > held.head.number:", "if number < 0:"),
        ("if last != held.head:", "if last.number != held.head.number:"),
        ("if noted is not None and noted.number > last.number:", "if noted is None:"),
        ("if any(line != lines[0] for line in lines):", "if not all(lines):"),
        ("is not None and there != data:", "is not None and not there:"),
    ]),
    *of("weightsync/control/coordinator.py", WS + "control/test_chain.py", changes=[
        ("puts, *history.ledger_entries(board, step))", "puts)"),
    ]),
    *of("weightsync/control/activation.py", WS + "control/test_activation.py", changes=[
        ("{**fence, **ready}", "{**ready}"),
        ("{**fence, **ready}", "{**fence}"),
    ]),
    *of("weightsync/control/state.py", WS + "control/test_splits.py", changes=[
        ("and left and whole and swap.canary", "and left and swap.canary"),
        ("if view.active is None or instance.active_epoch != view.active.epoch:", "if view.active is None:"),
        ("and same and instance.active_version == active.version == target", "and instance.active_version == active.version == target"),
        ("and same and instance.active_version == active.version == target", "and same and instance.active_version == active.version"),
        ("view.now < last.opened_at + REPLACE_S:", "view.now < last.opened_at:"),
        ("if any(i.active_epoch != active.epoch for i in present.values()) or not", "if not"),
        ("published = shares.get(version, view.target_fingerprint)", "published = view.target_fingerprint"),
        ("    return Step(\"open\", swap if moving else replace(swap, mode=\"together\"))", "    return Step(\"open\", swap)"),
        ("_try(view, swap, min(moving),", "_try(view, swap, min(swap.participants),"),
    ]),
    *of("weightsync/control/agent_state.py", WS + "control/test_splits.py", changes=[
        ("return record.id in swap.participants and not stays and", "return record.id in swap.participants and"),
        ("    view = view.of(record.id)\n    active, swap", "    active, swap"),
    ]),
    *of("weightsync/control/placement.py", WS + "control/test_splits.py", changes=[
        ("if instances < needed(split):", "if instances <= needed(split):"),
        ("if version in placed and len(placed[version]) < wanted[version]:", "if False:"),
        ("percents[v] * instances / 100.0 - found[v])", "percents[v])"),
        ("return all(found[version] >= split.minimum", "return any(found[version] >= split.minimum"),
        ("first = active if active in percents else max(", "first = max("),
    ]),
    *of(FLEET + "splits.py", GW + "fleet/test_splits.py", changes=[
        ("        credit[chosen] -= sum(self._percents[version] for version in versions)\n", "        credit[chosen] = 0.0\n"),
        ("return -math.log(drawn) / self._percents[version]", "return -math.log(drawn)"),
        ("if own is not None and own.version is not None:", "if own is not None:"),
        ("able = [v for v in versions if self._percents[v] > 0]", "able = versions"),
        ("chosen = request.share if request.share in meant else self._choose(meant, value)", "chosen = self._choose(meant, value)"),
        ("            return  # it was placed anew at most, and the turns go on\n", "            pass\n"),
        ("return any(i.record.active_version == version and i.health.admits(now) for i in self._serving)", "return False"),
    ]),
    *of(FLEET + "shadow.py", GW + "fleet/test_shadow.py", changes=[
        ("if waiting or not able or", "if not able or"),
        ("self._credit[version] -= 100.0", "self._credit[version] = 100.0"),
        ("if version == instance.record.active_version:", "if False:"),
        ("        request.repeated = True  #", "        pass  #"),
        ("elif relay.body_bytes > LIMIT_BYTES:", "elif False:"),
        ("room = max(1.0, instance.window.limit * FULL)", "room = instance.window.limit"),
        ("            if each.instance is instance:\n                each.end(\"cut\")", "            pass"),
        ("if not line.startswith(_OWN))", ")"),
    ]),
    *of("weightsync/store/sqlite_db.py", WS + "store/test_store.py", changes=[
        ("if found > expected or (found != expected", "if (found > expected"),
        ("if found > expected or (found != expected", "if (found != expected"),
        ("if found > expected or (found != expected and not key.endswith(\"/\")):", "if found != expected:"),
        ("            for lease in set(leases.values()):\n                self._require_lease(lease)\n", ""),
        ("SET expires = ttl + ? WHERE id = ?", "SET expires = expires + 0 * ? WHERE id = ?"),
        ("revision = self._revision() + 1\n", "revision = self._revision() + 2\n"),
        ("        if row is None:\n            return False\n        self._record(\"delete\"", "        self._record(\"delete\""),
        ("(start < oldest and oldest > 1)", "(start <= oldest and oldest > 1)"),
    ]),
    *of("weightsync/control/activation.py", WS + "control/test_coordinator.py", WS + "memory/test_parts.py", changes=[
        ("needed |= {active.version, active.previous}", "needed |= {active.version}"),
        ("return [v for v in candidates[spare:]", "return [v for v in candidates[spare + 1:]"),
    ]),
    *of("weightsync/format/fingerprint.py", WS + "format/test_fingerprint.py", changes=[
        ("if (other := boxes.setdefault(part.box, part)).sum != part.sum:", "if False and (other := boxes.setdefault(part.box, part)):"),
        ("or _overlap(unique)", ""),
        ("row, col = divmod(self._at, self._cols)", "row, col = 0, self._at % self._cols"),
        ("for name in sorted(checksums))", "for name in checksums)"),
    ]),
    *of("weightsync/format/fingerprint.py", WS + "format/test_finite.py", changes=[
        ("words.max() < limit | sign", "words.max() <= limit | sign"),
        ("words.view(signed).max() < limit)", "words.view(signed).max() <= limit)"),
        ("(np.uint8, 0x7F, np.int8)", "(np.uint8, 0x7E, np.int8)"),
        ("(np.uint64, 0x7FF0 << 48, np.int64)", "(np.uint64, 0x7FF8 << 48, np.int64)"),
    ]),
    *of("weightsync/format/versions.py", WS + "format/test_verify.py", changes=[
        ("if checksum != entry.checksum:", "if False:"),
        ("        slot.verify(name)\n", ""),
    ]),
    *of("weightsync/format/versions.py", WS + "format/test_diff.py", changes=[
        ("use = sound & (before != 0)", "use = before != 0", "what is not finite gives a ratio that is not finite, which is left out further down"),
        ("finite += int(np.count_nonzero(sound))", "finite += len(x)"),
    ]),
    *of("weightsync/format/delta_codec.py", WS + "format/test_delta.py", changes=[
        ("if places[-1] >= elements:", "if places[-1] > elements:"),
        ("if (size := zstandard.frame_content_size(data)) != nbytes:", "if (size := zstandard.frame_content_size(data)) > nbytes:"),
        ("if start != len(body):", "if start > len(body):"),
        ("if end > len(body):", "if end > len(body) + 1:"),
        ("or ends[-1] != len(numbers) - 1:", ":"),
        ("np.diff(places, prepend=-1) - 1", "np.diff(places, prepend=0)"),
    ]),
    *of("weightsync/format/delta.py", WS + "format/test_delta.py", changes=[
        ("return delta < PAYS_BELOW * full", "return delta <= full"),
        ("if base is None or base.manifest_digest != wanted.manifest_digest:", "if base is None:"),
        ("        if found != digest:\n", "        if False:\n"),
    ]),
    *of("weightsync/persist/disk.py", WS + "persist/test_persist.py", changes=[
        ("self.record.version == record.version and _digests(self.record) == _digests(record)", "self.record.version == record.version"),
        ("(path for path in self._all() if path not in stay)", "iter(self._all())"),
        ("self.nbytes + nbytes > self.max_bytes:", "self.nbytes + nbytes >= self.max_bytes:"),
        ("return path.name.isdecimal() and (path", "return (path"),
        ("{(stat.st_dev, stat.st_ino): stat.st_size for stat in found}.values()", "[stat.st_size for stat in found]"),
    ]),
    *of("weightsync/persist/disk.py", WS + "persist/test_persist.py", changes=[
        ("if (found := hasher.hexdigest()) != entry.digest:", "if not (found := hasher.hexdigest()):"),
    ]),
    *of("weightsync/persist/restore.py", WS + "persist/test_persist.py", changes=[
        ("            if piece.manifest_digest not in damaged\n", ""),
        ("ActiveRecord(record.version, lost.epoch + 1, None", "ActiveRecord(record.version, lost.epoch, None"),
        ("whole or (path is None and digest in self.copied)", "whole or digest in self.copied"),
    ]),
    *of("weightsync/persist/__main__.py", WS + "persist/test_persist.py", changes=[
        ("[active.version, active.previous, *shared_versions(active.split)]", "[active.version, *shared_versions(active.split)]"),
        ("[active.version, active.previous, *shared_versions(active.split)]", "[active.version, active.previous]"),
        ("protected = [r for r in needed if r.version != record.version]", "protected: list[VersionRecord] = []"),
    ]),
    *of("trainer/rollouts/experience.py", TR + "rollouts/test_experience.py", changes=[
        ("self.feed.drawn = max(self.feed.drawn, consumed)", "self.feed.drawn = consumed"),
        ("            self._taken.sort(key=lambda rollout: rollout.draw.number)  # which answer was faster must not count\n", ""),
        ("if length > self._longest:", "if length >= self._longest:"),
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
        ("delta + gamma * lam * following, following)", "delta + gamma * following, following)"),
        ("(values - baseline) * (others > 0)", "values - baseline"),
    ]),
    *of("trainer/algorithms/policy.py", TR + "algorithms/test_policy.py", changes=[
        ("-torch.minimum(ratio * advantage, bounded * advantage)", "-(bounded * advantage)"),
        ("self._proximal_is_own and c.updates > 1", "self._proximal_is_own and c.updates >= 1"),
        ("c.overlong_penalty * min(o, 1.0)", "c.overlong_penalty * o"),
    ]),
    *of("trainer/algorithms/offline.py", TR + "algorithms/test_dpo.py", changes=[
        ("- 1 / (2 * c.beta)).square()", "- 1 / c.beta).square()"),
        ("/ (1 - 2 * c.label_smoothing)", ""),
    ]),
    *of("trainer/api/losses.py", TR + "api/test_losses.py", changes=[
        ("sums_B1 / marked_BT.sum(-1, keepdim=True).clamp(min=1)", "sums_B1 / now_BT.shape[-1]"),
        ("torch.exp(mean_B1 + logprobs_BT - now_BT)", "torch.exp(mean_B1)"),
    ]),
    *of("trainer/api/finetuning/examples.py", JOBS + "test_examples.py", changes=[
        ('if raw["role"] == "assistant" and raw.get("weight", 1):', 'if raw["role"] == "assistant":'),
        ("for sequence in found)) > self._longest:", "for sequence in found)) >= self._longest:"),
        ("mask + (0.0,) * len(between) + learned", "mask + (1.0,) * len(between) + learned"),
        ("if len(found) > 1:", "if len(found) > 2:"),
    ]),
    *of("trainer/api/finetuning/steps.py", JOBS + "test_steps.py", changes=[
        ("self.learning_rate * (1 - step / self.steps)", "self.learning_rate"),
        ("math.ceil(self.rows / self.batch)", "self.rows // self.batch"),
        ("shuffled(self.rows, self.seed, epoch, within", "shuffled(self.rows, self.seed, 0, within"),
        ("{\"loss\": float(loss.detach()), **sums}, -leaf_BT.grad", "{\"loss\": float(loss.detach()), **sums}, leaf_BT.grad"),
    ]),
    *of("trainer/api/finetuning/run.py", JOBS + "test_jobs.py", changes=[
        ("accuracy = said[CORRECT] / tokens", "accuracy = said[CORRECT] / len(sequences)"),
        ("await self._batch(number, sequences, fields[MASK], forward=True)", "await self._batch(number, sequences, torch.ones_like(fields[MASK]), forward=True)"),
        ("total + float(found.total), count + float(found.denominator), right", "float(found.total), float(found.denominator), right"),
        ("rank = about[\"rank\"] if number == POLICY else 1", "rank = 1"),
    ]),
    *of("trainer/api/finetuning/jobs.py", JOBS + "test_jobs.py", changes=[
        ("max(1, min(MOST_AUTO_BATCH, rows // MOST_AUTO_BATCH))", "min(MOST_AUTO_BATCH, rows // MOST_AUTO_BATCH)"),
        ("(job.about[\"status\"] != RUNNING, self._turns[job.owner], job.made)", "(job.about[\"status\"] != RUNNING, job.made)"),
        ("if job.owner == client.owner and identity in (job", "if identity == job.id and identity in (job"),
        ("*([event] if \"valid_loss\" in measured else [])", "*[event]"),
    ]),
    *of("weightsync/vllm_engine/routing.py", WS + "vllm_engine/test_routing.py", changes=[
        ("            return recorded.rows[:0]\n", "            return recorded.rows\n"),
        ("keys[: len(keys) - store.num_slots]", "keys[: len(keys) - store.num_slots - 1]"),
        ("                store._free_slots.append(slot)\n", "                pass\n"),
    ]),
    *of("server/instance/routed_experts.py", "tests/server/instance/test_routed_experts.py", changes=[
        ("< len(prompt) - start + written - 1", "< len(prompt) - start + written - 2"),
        ("            params.skip_reading_prefix_cache = True\n", ""),
    ]),
    *of("trainer/batch.py", TR + "test_batch.py", changes=[
        ("place = bisect.bisect_left(room, (lengths[index], -1))", "place = bisect.bisect_left(room, (lengths[index] + 1, -1))"),
        ("if lengths and max(lengths) > max_tokens:", "if lengths and max(lengths) >= max_tokens:"),
        ("count = -(-len(bins) // ranks) * ranks", "count = len(bins)"),
        ("count = -(-rows // (size * ranks * group)) * group", "count = -(-rows // (size * ranks))"),
    ]),
    *of("trainer/megatron/gradients.py", TR + "api/test_ranks.py::test_ranks_train_as_one_does_and_go_on_in_its_place", changes=[
        ("gradient[name] += parameter.grad", "gradient[name] = parameter.grad.clone()"),
        ("group=ps.get_expert_data_parallel_group() if spread else everywhere", "group=everywhere"),
        ("if param_is_not_shared(parameter) and param_is", "if param_is"),
        (" and param_is_not_tensor_parallel_duplicate(parameter):", ":"),
        ("        finalize_model_grads(chunks)\n", "        pass\n"),
    ]),
    *of("trainer/megatron/passes.py", TR + "api/test_losses.py", changes=[
        ("labels=padded(batch[LABELS] if LABELS in batch else tokens[:, 1:])[:, mine],", "labels=padded(tokens[:, 1:])[:, mine],"),
    ]),
    *of("trainer/api/tenants.py", TR + "api/test_losses.py", changes=[
        ("                self.gradient[name] += g\n", "                self.gradient[name] = g\n"),
        ("torch.where(inside, loss.function(logprobs_BT, fields, options), 0.0)", "loss.function(logprobs_BT, fields, options)"),
    ]),
    *of("trainer/api/queue.py", TR + "api/test_crash.py::test_a_server_that_is_asked_to_end_says_so_to_who_waits", changes=[
        ("        if answer is None:\n            self._check()\n", ""),
    ]),
    *of("trainer/api/states.py", TR + "api/test_sdk.py::test_a_state_that_is_not_whole_is_refused", changes=[
        ("            if not (directory / file).exists():", "            if False:"),
    ]),
    *of("trainer/rollouts/schedules.py", TR + "rollouts/test_asynchronous.py", changes=[
        ("else max(buffer, setup.batch)", "else buffer"),
        ("min(self._in_time(step + 1), steps_left * self.batch)", "self._in_time(step + 1)"),
        ("deadline = pending.served + self.max_lag\n", "deadline = pending.served + self.max_lag + 1\n"),
    ]),
    *of("trainer/rollouts/schedules.py", TR + "rollouts/test_in_order.py", TR + "rollouts/test_asynchronous.py", changes=[
        ("group.within(step, self.max_lag + finished.patience)", "group.within(step, self.max_lag + finished.patience + 1)"),
        ("        self._refills_left -= 1\n", ""),
    ]),
    *of("server/follow/sources.py", FOLLOW + "test_sources.py", changes=[
        ("if (got := part.stat().st_size) != file.size:", "if (got := part.stat().st_size) < 0:"),
        ("        if there < total:", "        if there < 1:"),
        ("if total > 1 and INDEX not in names:", "if False:"),
        ("sorted(shards & indexed if (indexed := _of_index(home)) else shards)", "sorted(shards)"),
        ("if listed.exists() and unlisted:", "if False:"),
        ("if size > shutil.disk_usage(home).free:", "if False:"),
        ("int(part) if index % 2 else part", "part"),
        (" if not n.startswith((\".\", \"tmp-\"))", ""),
        ("if other != home:", "if False:"),
    ]),
    *of("server/follow/loop.py", FOLLOW + "test_follow.py", changes=[
        ("if not self._over(candidate, state) and self._settled(candidate):", "if not self._over(candidate, state):"),
        ("same = self._identity_of(candidate) == now.identity", "same = True"),
        ("return not release[\"ended\"] or bool(now.before and release[\"id\"] != now.before)", "return False"),
        ("return bool(split) or (release is not None and not release[\"ended\"])", "return False"),
        ("return last.outcome != \"superseded\"", "return True"),
        ("if error.status in REFUSED:", "if False:"),
        ("return natural(candidate.name) < natural(last.name)", "return False"),
        ("self._write(replace(now, version=None, attempt=now.attempt + 1))", "pass"),
        ("if waiting := self._waiting_for(version):", "if waiting := \"\":"),
        ("failures = min(failures + 1, 10)", "pass"),
    ]),
    *of("server/follow/state.py", FOLLOW + "test_sources.py", changes=[
        ("if found.source != source:", "if False:"),
        ("fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    ]),
    *of("weightsync/push.py", f"{GW}admin/test_push_process.py", changes=[
        ("made = _made_before(publisher, upload_id) if upload_id else None", "made = None"),
    ]),
    *of(GATEWAY + "observe/webhooks.py", f"{GW}observe/test_webhooks.py", changes=[
        ("if entry.model and not self._serves(entry.model):", "if False:"),
        ("if 200 <= status < 300:", "if status < 600:"),
        ("self.counts.outcomes[\"lost\"] += to - self.number", "pass"),
        ("to = archived if archived > self.number else last", "to = last"),
        ("return HookRecord.from_json(found.value).number", "return await self._last()"),
        ("content = f\"{message_id}.{timestamp}.\".encode() + body", "content = body"),
    ]),
    *of(GATEWAY + "release/statistics.py", f"{GW}release/test_statistics.py", f"{GW}release/test_judge.py", changes=[
        (">= -math.log(alpha)", ">= math.log(alpha)"),
        ("math.lgamma(1 + n - s)", "math.lgamma(n - s)"),
        ("twice + math.log(twice + 1)", "twice"),
        ("if n < LEAST:", "if n < 2:"),
        ("return outside", "return inside", "they lie 1e-12 apart"),
    ]),
    *of(GATEWAY + "release/judge.py", f"{GW}release/test_judge.py", changes=[
        ("each = alpha / 2 if condition.compares else alpha", "each = 1.0 if condition.compares else alpha"),
        ("if evidence.lost:", "if not evidence.lost:"),
        ("if tally.count < least:", "if tally.count > least:"),
        ("c.low - s.high - slackest", "c.high - s.low - slackest"),
        ("s.low - c.high - slackest", "s.high - c.low - slackest"),
        ("if lasted_s < over:", "if lasted_s <= over:"),
        ('(f.state == "open" and f.condition.prove)', 'f.state == "open"'),
    ]),
    *of(GATEWAY + "release/policy.py", f"{GW}release/test_judge.py", changes=[
        ("return self.false_alarms / max(1, tests)", "return self.false_alarms"),
        ("if shares != sorted(shares):", "if False:"),
    ]),
    *of(GATEWAY + "release/progress.py", f"{GW}release/test_progress.py", changes=[
        ("if world.active != record.stable or set(world.shares) - {record.version}:", "if world.active != record.stable:"),
        ("if not world.ready:", "if False:"),
        ("if has != wanted:", "if has is None:"),
        ("if world.active not in (record.stable, record.version):", "if False:"),
        ("if world.shares is None:", "if False:"),
    ]),
    *of(GATEWAY + "release/evidence.py", f"{GW}release/test_runner.py", changes=[
        ("if watched is None or version not in watched.versions or not math.isfinite(value):", "if watched is None or version not in watched.versions:"),
        ("if finished.first_version is not None and finished.first_version != finished.last_version:", "if False:"),
        ('if condition.answers == "both" else (condition.answers,)', 'if condition.answers else (condition.answers,)'),
    ]),
    *of(GATEWAY + "release/runner.py", f"{GW}release/test_runner.py", changes=[
        ('if record.state == "finishing":', 'if record.state == "rolling_back":'),
        ("if version == stable:", "if False:"),
        ("elif record.reason != str(error):", "elif False:"),
    ]),
    *of("trainer/rewards/server.py", f"{TR}rewards/test_server.py", changes=[
        ("if key and not hmac.compare_digest", "if not hmac.compare_digest"),
        ("return self._pending >= self._room", "return False"),
        ("replace(reward, weight=1.0)", "reward", "the score of one reward alone is its part, which has no weight"),
    ]),
]  # fmt: skip
