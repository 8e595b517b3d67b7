# ruff: noqa: E501 - lines of other files, as they are
"""Mutations of the rest of the server: instances, the follower, kept answers."""

from __future__ import annotations

from .base import ANSWERS, FOLLOW, GW, Mutation, of

MUTATIONS: list[Mutation] = [
    *of("server/instance/editions.py", "tests/server/instance/test_editions.py", "tests/simulation/test_editions.py", changes=[
        ("(name in self._known or not self._engine.answers_to(name))", "True"),
        ("await asyncio.shield(building)", "await building"),
        ("if error.code in ENGINE_FAULTS or isinstance(error, StoreError) else 422", "if error.code in ENGINE_FAULTS else 422"),
        ("problem is not None and time.monotonic() < until", "False"),
        ("        await asyncio.to_thread(self._trust.check_part, self._keys.model, places[host])\n", ""),
        ("idle = [name for name in self._loaded if name not in self._users]", "idle = list(self._loaded)"),
        ("gone = [name for name in idle if name not in self._known]", "gone = list[str]()"),
        ("                    self._loaded.move_to_end(name)\n", "                    pass\n"),
        ("            if record.full_name not in self._loaded:\n", "            if True:\n"),
        ("if name in self._users or self._loaded.pop(name, name) is not None:", "if self._loaded.pop(name, name) is not None:"),
        ("self._known.pop(self._by_key.pop(event.kv.key, \"\"), None)", "pass"),
        ("            async with self._turns[name]:\n                if name not in self._loaded and", "            if True:\n                if name not in self._loaded and"),
    ]),
    *of("server/answers/parse.py", ANSWERS + "test_parse.py", changes=[
        ("if told and (last or not choice.token_ids):", "if told:"),
        ("for event in answer.split(b\"\\n\\n\")[:-1]:", "for event in answer.split(b\"\\n\\n\"):"),
        ("record.choices.sort(key=lambda choice: choice.index)", "pass"),
    ]),
    *of("server/answers/measures.py", ANSWERS + "test_parse.py", changes=[
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
    *of("server/instance/provenance.py", "tests/server/instance/test_calls.py", changes=[
        ("        if one and len(self._versions) > 1:", "        if False:"),
        ("self._earlier = self.spans(0)", "self._earlier = []"),
        ("self.wish = replace(self.wish, policy=\"finish\")", "pass"),
        ("        if self._held is None:\n            await inflight.admit", "        if True:\n            await inflight.admit"),
        ("            if not self._users and", "            if"),
        ("        if self._beams and not whole:", "        if False:"),
        ("inflight.active != trace.began and", "False and"),
    ]),
    *of("server/instance/prefixes.py", "tests/server/instance/test_prefixes.py", changes=[
        ("whole = not self._count - len(self._changes) <= told <= self._count", "whole = not told <= self._count"),
        ("self._ranks.get((version, prefix), 0) & ~(1 << rank)", "0"),
        ("if name == self._name and", "if"),
        ("if time.monotonic() >= self._fresh_until:", "if True:"),
    ]),
    *of("server/instance/grammars/bounds.py", "tests/server/instance/test_bounds.py", changes=[
        ("if depth > MOST_DEPTH:", "if depth >= MOST_DEPTH:"),
        ("        if nodes > MOST_NODES:", "        if nodes >= MOST_NODES:"),
        ("    return inner\n", "    return repeats\n"),
        ("low if high >= int(sre.MAXREPEAT) else high", "low"),
        ("check_pattern(node[\"pattern\"], repeats)", "check_pattern(node[\"pattern\"])"),
        ("for part in body.split(\"|\") if", "for part in [body] if"),
        ("            left += first.get(rule, ())\n", "            pass\n"),
        ("        seen.add(reference)\n", "        seen = {reference}\n"),
    ]),
    *of("server/instance/requests.py", "tests/server/instance/test_bounds.py", changes=[
        ("max(ids) < vocabulary:", "max(ids) <= vocabulary:"),
        ("if ids and not 0 <= min(ids) <= max(ids)", "if ids and not max(ids)"),
        ("(prompt.get(\"encoder_prompt\"), prompt.get(\"decoder_prompt\"))", "(prompt.get(\"decoder_prompt\"),)"),
        ("place.offset + place.length)}", "place.offset + place.length + 1)}"),
    ]),
    *of("server/instance/sidecar.py", "tests/server/instance/test_sidecar.py", changes=[
        ("        await asyncio.to_thread(self._trust.check, self._config.model, places[self._host], config)\n", ""),
        ("if report[\"path\"] != \"retained\" or not same(fingerprint, version.fingerprint):", "if report[\"path\"] != \"retained\":"),
        ("previous=version.version == self._suspect)", "previous=True)"),
        ("            asyncio.get_running_loop().call_later(TORN_LINGER_S, os.kill, os.getpid(), signal.SIGTERM)\n", ""),
        ("            await asyncio.shield(self._warm)\n", "            pass\n"),
    ]),
    *of("server/instance/sidecar.py", "tests/server/instance/test_leaving.py::test_an_instance_that_cannot_end_its_requests_does_not_wait", changes=[
        (" or participant.record.state == \"TORN\":", ":"),
    ]),
    *of("server/instance/routed_experts.py", "tests/server/instance/test_routed_experts.py", changes=[
        ("< len(prompt) - start + written - 1", "< len(prompt) - start + written - 2"),
        ("            params.skip_reading_prefix_cache = True\n", ""),
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
        ("if self._settled(candidate):", "if candidate:"),
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
    *of("server/follow/versions.py", FOLLOW + "test_versions.py", changes=[
        ('{"onto": str(before)} if before > active else {}', "{}"),
    ]),
    *of("server/follow/loop.py", FOLLOW + "test_follow.py", changes=[
        ("if seen > since}", "if seen >= since}"),
        ("self._clock() - min(self._behind.values())", "self._clock() - max(self._behind.values())"),
    ]),
]  # fmt: skip
