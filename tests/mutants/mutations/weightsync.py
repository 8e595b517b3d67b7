# ruff: noqa: E501 - lines of other files, as they are
"""Mutations of weightsync."""

from __future__ import annotations

from .base import GW, WS, Mutation, of

MUTATIONS: list[Mutation] = [
    *of("weightsync/control/editions.py", WS + "publish/test_editions.py", changes=[
        ("        if percent:\n", "        if True:\n"),
        ("            if left < percent:\n", "            if True:\n"),
        ("    stay |= {next((r.number for r in found if r.percent), 0) for found in by_name.values()}\n", ""),
        ("[r for r in by_name[new.name] if r.percent or r is not new][keep:]", "by_name[new.name][keep:]"),
        ("if new.created_at - r.created_at > max_age_s]", "if new.created_at - r.created_at < max_age_s]"),
        ("for r in gone if r.number not in stay}", "for r in gone}"),
        ("number.isdecimal() and", "number and"),
    ]),
    *of("weightsync/publish/session.py", WS + "publish/test_editions.py", changes=[
        ("            puts = {key_of(self.keys, old.name, old.number): None for old in gone}\n", "            puts = dict.fromkeys(gone[:0], None)\n"),
        ("{**puts, self.keys.version(number): None, key: made.to_json()}", "{**puts, key: made.to_json()}"),
        ("await append(self.store, fence, {key_of(", "await append(self.store, {}, {key_of("),
        ("for record in readable({kv.key: kv.value for kv in found}) if name in (\"\", record.name)]", "for record in readable({kv.key: kv.value for kv in found})]"),
        ("for raw in (*unread, *editions) for slot", "for raw in unread for slot"),
    ]),
    *of("weightsync/publish/draft.py", WS + "publish/test_editions.py", changes=[
        ("        if self.edition is None:\n", "        if False:\n"),
        ("    if any(draft.edition is not None for draft in drafts):\n", "    if False:\n"),
    ]),
    *of("weightsync/control/state.py", "tests/loadtest/test_histories.py", changes=[
        ("        return math.inf\n", "        return confirm_within_s(swap)\n"),
    ]),
    *of("weightsync/vllm_engine/engine_core/requests.py", WS + "vllm_engine/engine_core/test_requests.py", changes=[
        (" or is_withdrawn(request, parts)", ""),
        ("if state is not None and state.detokenizer is None:", "if False:"),
    ]),
    *of("weightsync/vllm_engine/engine_core/core.py", WS + "vllm_engine/engine_core/test_requests.py", changes=[
        (" or requests.is_withdrawn(request, runs.parts)", ""),
        ("        same = before.of(request) == now.of(request)", "        same = False"),
        ("if rescaled or (recomputes and not same):", "if recomputes and not same:"),
        ("        elif before.of(request) != now.of(request):  # its", "        elif False:  # its"),
    ]),
    *of("weightsync/vllm_engine/staging/bundle.py", WS + "vllm_engine/staging/test_bundle.py", changes=[
        ("                piece.withdraw()", "                pass"),
        ("                withdraw()\n", "                pass\n"),
    ]),
    *of("weightsync/vllm_engine/engine_core/sessions.py", WS + "vllm_engine/engine_core/test_sessions.py", changes=[
        ("found.append(mixed if mark else plain[block])", "found.append(plain[block])"),
        ("for s in course.stretches if s.weights in weights)", "for s in course.stretches if not s.weights)"),
        ("digest.update(repr(stretch[:2]).encode())", "digest.update(b'')"),
        ("if not allows(wish, s.version)), None)", "if not s.weights), None)"),
        ("del request.block_hashes[tokens // self._block_size :]", "del request.block_hashes[-1:]"),
    ]),
    *of("weightsync/vllm_engine/engine_core/steps.py", WS + "vllm_engine/engine_core/test_steps.py", changes=[
        ("(step := self.step_counter + 1) == 1 or step %", "(step := self.step_counter) == 1 or step %"),
        ("local_unfinished or asked(self) is not None", "local_unfinished"),
        ("version != NOTHING and least.tolist() == [version, -version]", "least.tolist()[0] == version"),
        ("    core.engines_running = True\n", ""),
        ("    core._hotswap_asked = None\n", ""),
    ]),
    *of("weightsync/vllm_engine/engine_core/prefixes.py", WS + "vllm_engine/engine_core/test_prefixes.py", changes=[
        ("if known is not None and (key in self._held or known == block):", "if known is not None and known == block:"),
        ("            self._blocks.move_to_end(key)\n", ""),
        ("if block in self.holdings and not self._holds(block):", "if block in self.holdings:"),
        ("if events := self._manager.take_events():", "if events := ():"),
        (" - len(replay_of(request).get(\"tokens\", ()))", ""),
    ]),
    *of("weightsync/control/state.py", WS + "control/test_state.py", changes=[
        ("if waiting and view.left_s(swap) <= 0:", "if waiting and view.left_s(swap) < 0:"),
        ("(instance.active_version, instance.active_epoch) == (asked.version, asked.epoch)", "instance.active_version == asked.version"),
        ("return runs and instance.state == \"COMMITTING\"", "return runs"),
        ("instance.active_epoch >= active.epoch and instance.state != \"COMMITTING\"", "instance.active_epoch >= active.epoch"),
        ("ends = replace(active, trial=None) if", "ends = active if"),
        ("    if view.active is None or view.active.trial is None:\n", "    if view.active is None:\n"),
        ("    if view.target_state != \"ready\":\n        return abort(", "    if view.target_state is None:\n        return abort("),
        ("previous = former.previous  # committing", "previous = former.version  # committing"),
        ("if late and view.left_s(swap) > 0:", "if late and view.left_s(swap) >= 0:"),
        ("if swap.on_lost == \"continue\" and left and whole and swap.canary not in lost:", "if swap.on_lost == \"continue\" and left and whole:"),
        ("not confirmed(i, active) and i.state in PARTICIPATING]", "not confirmed(i, active)]"),
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
        ("if retry_s is None and (self.record != record or any(task.done() for task in under_way)):", "if False:"),
        ("            await former.end()  # only now", "            pass  # only now"),
        ("if self._left and record.state != \"TORN\":", "if self._left:"),
    ]),
    *of("weightsync/control/swap.py", WS + "control/test_agent.py", changes=[
        ("            staging.task.cancel()\n        if staging.unwanted", "        if staging.unwanted"),
        ("return self.staging.task.done() and not self.staging.unwanted", "return self.staging.task.done()"),
        ("                await self._let_go(board, active.version)  # or", "                pass  # or"),
    ]),
    *of("weightsync/control/swap.py", WS + "control/test_rolling.py", changes=[
        ("if not agent_state.same(result.fingerprint, active.fingerprint):", "if False:"),
        ("if self.record.staged_version != self.record.active_version:", "if False:"),
    ]),
    *of("weightsync/control/agent.py", WS + "control/test_rolling.py", changes=[
        ("if self._draining is None or self._draining[0] != swap.id:", "if self._draining is None:"),
    ]),
    *of("weightsync/control/pauses.py", WS + "control/test_pausing.py", changes=[
        ("return any(end > now for end in self._ends.values())", "return bool(self._ends)"),
        ("            self._known.clear()\n            await self._apply()\n", "            pass\n"),
    ]),
    *of("weightsync/control/swap.py", WS + "control/test_coordinator.py", changes=[
        ("        found.append(keys.instances)\n", "        pass\n"),
    ]),
    *of("weightsync/control/swap.py", WS + "control/test_state.py", changes=[
        ("        found.append(keys.target)\n", "        pass\n"),
    ]),
    *of("weightsync/signing.py", WS + "test_signing.py", changes=[
        ("if not part.signature:", "if False:"),
        ("if signed.get(\"name\") != _name(model, part.name):", "if not signed.get(\"name\"):"),
        ("if found != signed.get(\"sha256\"):", "if not found:"),
        (" and since <= now < until), None)", "), None)"),
        ("        except InvalidSignature:\n            return False", "        except InvalidSignature:\n            return True"),
        ("for part in (base, *record.parts):", "for part in (base,):"),
    ]),
    *of("weightsync/control/parts.py", WS + "test_signing.py", changes=[
        ("        signature=base.signature,\n", ""),
    ]),
    *of("weightsync/control/chain.py", WS + "control/test_chain.py", changes=[
        ("if conflict.key != HEAD:", "if conflict.key == HEAD:"),
        ("linked = entry.after(head)", "linked = entry.after(HeadRecord(head.number))"),
    ]),
    *of("server/ledger.py", WS + "control/test_chain.py", changes=[
        ("if entry.digest != entry.expected:", "if not entry.digest:"),
        ("if entry.previous != last.digest:", "if not entry.previous and number > 1:"),
        ("if number > held.head.number:", "if number < 0:"),
        ("if last != held.head:", "if last.number != held.head.number:"),
        ("if noted is not None and noted.number > last.number:", "if noted is None:"),
        ("if any(line != lines[0] for line in lines):", "if not all(lines):"),
        ("is not None and there != data:", "is not None and not there:"),
    ]),
    *of("weightsync/control/swap.py", WS + "control/test_chain.py", changes=[
        ("puts, *history.ledger_entries(board, step))", "puts)"),
    ]),
    *of("weightsync/control/swap.py", WS + "control/test_requests.py", changes=[
        ("{**fence, **ready}", "{**ready}"),
        ("{**fence, **ready}", "{**fence}"),
    ]),
    *of("weightsync/control/state.py", WS + "control/test_splits.py", changes=[
        ("and left and whole and swap.canary", "and left and swap.canary"),
        ("if view.active is None or instance.active_epoch != view.active.epoch:", "if view.active is None:"),
        ("and same and instance.active_version == active.version == target", "and instance.active_version == active.version == target"),
        ("and same and instance.active_version == active.version == target", "and same and instance.active_version == active.version"),
        ("view.lasted_s < REPLACE_S:", "view.lasted_s < 0:"),
        ("if any(i.active_epoch != active.epoch for i in present.values()) or not", "if not"),
        ("published = shares.get(version, view.target_fingerprint)", "published = view.target_fingerprint"),
        ("    return Step(\"open\", swap if moving else replace(swap, mode=\"together\"))", "    return Step(\"open\", swap)"),
        ("_try(view, swap, min(moving))", "_try(view, swap, min(swap.participants))"),
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
    *of("weightsync/control/swap.py", WS + "control/test_coordinator.py", WS + "test_parts.py", changes=[
        ("needed |= {active.version, active.previous}", "needed |= {active.version}"),
        ("if not v.refused][:spare]", "if not v.refused][: spare + 1]"),
    ]),
    *of("weightsync/format/fingerprint.py", WS + "format/test_fingerprint.py", changes=[
        ("if (other := boxes.setdefault(part.box, part)).sum != part.sum:", "if False and (other := boxes.setdefault(part.box, part)):"),
        ("or _overlap(unique)", ""),
        ("row, col = divmod(self._at, self._cols)", "row, col = 0, self._at % self._cols"),
        ("for name in sorted(checksums))", "for name in checksums)"),
        ("words.max() < limit | sign", "words.max() <= limit | sign"),
        ("words.view(signed).max() < limit)", "words.view(signed).max() <= limit)"),
        ("(np.uint8, 0x7F, np.int8)", "(np.uint8, 0x7E, np.int8)"),
        ("(np.uint64, 0x7FF0 << 48, np.int64)", "(np.uint64, 0x7FF8 << 48, np.int64)"),
    ]),
    *of("weightsync/versions.py", WS + "test_versions.py", changes=[
        ("if checksum != entry.checksum:", "if False:"),
        ("        slot.verify(name)\n", ""),
        ("use = sound & (before != 0)", "use = before != 0", "what is not finite gives a ratio that is not finite, which is left out further down"),
        ("finite += int(np.count_nonzero(sound))", "finite += len(x)"),
    ]),
    *of("weightsync/format/delta_codec.py", WS + "publish/test_delta.py", changes=[
        ("if places[-1] >= elements:", "if places[-1] > elements:"),
        ("if (size := zstandard.frame_content_size(data)) != nbytes:", "if (size := zstandard.frame_content_size(data)) > nbytes:"),
        ("if start != len(body):", "if start > len(body):"),
        ("if end > len(body):", "if end > len(body) + 1:"),
        ("or ends[-1] != len(numbers) - 1:", ":"),
        ("np.diff(places, prepend=-1) - 1", "np.diff(places, prepend=0)"),
    ]),
    *of("weightsync/publish/delta.py", WS + "publish/test_delta.py", changes=[
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
        ("whole or ((path is None or bool(piece.shares)) and digest in self.copied)", "whole or digest in self.copied"),
    ]),
    *of("weightsync/control/swap.py", WS + "persist/test_persist.py", changes=[
        ("ActiveRecord(record.version, lost.epoch + 1, None", "ActiveRecord(record.version, lost.epoch, None"),
    ]),
    *of("weightsync/publish/spread.py", WS + "peer/test_spread.py::test_chunks_stay_whose_tensors_are_all_there", changes=[
        ("chunks_of(schema, layout, here) & ~chunks_of(schema, layout, schema.tensors.keys() - here)", "chunks_of(schema, layout, here)"),
        ("found |= (1 << last + 1) - (1 << first)", "found |= 1 << first"),
    ]),
    *of("weightsync/publish/spread.py", WS + "peer/test_spread.py::test_every_layout_gives_the_same_manifest_and_bytes", changes=[
        ("[*self._borders(known, stay), *_cut(parts, known)]", "[*_cut(parts, known)]"),
        ("start = self.first + row * self.step", "start = self.first"),
    ]),
    *of("weightsync/publish/spread.py", WS + "peer/test_spread.py::test_what_came_is_compared_with_what_was_written", changes=[
        ("if strip.sum(into.view) != strip.digest:", "if not strip.sum(into.view):"),
    ]),
    *of("weightsync/publish/spread.py", WS + "peer/test_spread_faults.py::test_the_next_version_leaves_a_share_that_a_record_names", changes=[
        ("if not journal.share or journal.digest in kept", "if not journal.share"),
    ]),
    *of("weightsync/peer/shelf.py", WS + "peer/test_spread_faults.py::test_a_peer_that_starts_before_the_commit_keeps_the_share", changes=[
        ("            if journal.share:\n                continue\n", ""),
    ]),
    *of("weightsync/persist/restore.py", WS + "peer/test_spread_faults.py::test_a_server_that_starts_keeps_versions_that_are_whole_nowhere", changes=[
        ("(digest in self.copied or slot_is_left(path, digest))", "digest in self.copied"),
    ]),
    *of("weightsync/publish/session.py", WS + "peer/test_spread_faults.py::test_a_commit_whose_answer_is_lost_is_one", changes=[
        ("if found is None or found.value != puts[key]:", "if found is not None:"),
    ]),
    *of("weightsync/peer/plan.py", WS + "peer/test_plan.py", changes=[
        ("return free | lacks", "return free"),
    ]),
    *of("weightsync/peer/service.py", WS + "peer/test_shelf.py", changes=[
        ("if not copy.is_source and d not in urgent]", "if d not in urgent]"),
    ]),
    *of("weightsync/persist/__main__.py", WS + "persist/test_persist.py", changes=[
        ("[active.version, active.previous, *shared_versions(active.split)]", "[active.version, *shared_versions(active.split)]"),
        ("[active.version, active.previous, *shared_versions(active.split)]", "[active.version, active.previous]"),
        ("protected = [r for r in needed if r.version != record.version]", "protected: list[VersionRecord] = []"),
    ]),
    *of("weightsync/vllm_engine/engine_core/routing.py", WS + "vllm_engine/engine_core/test_routing.py", changes=[
        ("            return recorded.rows[:0]\n", "            return recorded.rows\n"),
        ("keys[: len(keys) - store.num_slots]", "keys[: len(keys) - store.num_slots - 1]"),
        ("                store._free_slots.append(slot)\n", "                pass\n"),
    ]),
    *of("weightsync/push.py", f"{GW}admin/test_push_process.py", changes=[
        ("made = _made_before(publisher, upload_id) if upload_id else None", "made = None"),
    ]),
    *of("weightsync/bucket/objects.py", WS + "bucket/test_bucket.py", changes=[
        ("if users or number == numbers[-1]:", "if users:"),
        ("if version.base == number or (", "if ("),
        ("for at in found[number].newest.values()]", "for at in (number,)]"),
        ("if len(data) != part.nbytes or digest_of(data) != part.digest:", "if len(data) != part.nbytes:"),
    ]),
    *of("weightsync/bucket/publisher.py", WS + "bucket/test_bucket.py", changes=[
        ("versions.deltas + 1 < self._full_every", "versions.deltas < self._full_every"),
        ("if part != versions.part}", "if part}"),
        ("self._newest = self.bucket.newest_parts()", "self._newest = {}"),
    ]),
    *of("weightsync/bucket/reader.py", WS + "bucket/test_bucket.py", changes=[
        ("if not held(other):", "if False:"),
    ]),
    *of("weightsync/bucket/carrier.py", WS + "bucket/test_bucket.py", changes=[
        ("before = self._waiting.pop(order.part, None)", "before = None"),
        ("if self._process.poll() is not None:", "if False:"),
    ]),
]  # fmt: skip
