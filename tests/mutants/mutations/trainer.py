# ruff: noqa: E501 - lines of other files, as they are
"""Mutations of the trainer."""

from __future__ import annotations

from .base import JOBS, TR, Mutation, of

MUTATIONS: list[Mutation] = [
    *of("trainer/data/answers.py", TR + "data/test_answers.py", changes=[
        ("index.said[at][\"time\"] <= record[\"time\"]:", "index.said[at][\"time\"] > record[\"time\"]:"),
        (" and choice[\"finish_reason\"] not in CUT", ""),
        ("and said[\"score\"] > self.liked.get(prompt, (0.0, \"\"))[0]:", "and True:"),
        ("if not chosen or chosen == rejected:", "if not chosen:"),
        ("self.first.setdefault(_digest(_asked(record, 0)), _key(record))", "self.first[_digest(_asked(record, 0))] = _key(record)"),
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
    *of("trainer/algorithms/offline.py", TR + "algorithms/test_offline.py", changes=[
        ("- 1 / (2 * c.beta)).square()", "- 1 / c.beta).square()"),
        ("/ (1 - 2 * c.label_smoothing)", ""),
    ]),
    *of("trainer/api/losses.py", TR + "api/test_losses.py", changes=[
        ("sums_B1 / marked_BT.sum(-1, keepdim=True).clamp(min=1)", "sums_B1 / now_BT.shape[-1]"),
        ("torch.exp(mean_B1 + logprobs_BT - now_BT)", "torch.exp(mean_B1)"),
    ]),
    *of("trainer/data/conversation.py", TR + "data/test_conversation.py", changes=[
        ("mask + (0,) * len(between) + learned", "mask + (1,) * len(between) + learned"),
        ("if thoughts.strip() not in written:", "if False:"),
        ("if self._same(text, [*messages[:place], {**message", "if False and self._same(text, [*messages[:place], {**message"),
    ]),
    *of("trainer/data/tokenizer.py", TR + "data/test_conversation.py", changes=[
        ('and message.get("weight") != 0:', "and True:"),
        ("self.behind(text.removeprefix(self._end or self._tail) if ended else text)", "self.plain(text)"),
    ]),
    *of("trainer/api/finetuning/examples.py", JOBS + "test_examples.py", changes=[
        ("for sequence in found)) > self._longest:", "for sequence in found)) >= self._longest:"),
        ("if len(found) > 1:", "if len(found) > 2:"),
    ]),
    *of("trainer/api/finetuning/steps.py", JOBS + "test_examples.py", changes=[
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
    *of("trainer/rollouts/schedules.py", TR + "rollouts/test_in_order.py", changes=[("        self._refills_left -= 1\n", "")]),
    *of("trainer/rollouts/schedules.py", TR + "rollouts/test_partial.py::test_tokens_over_the_bound_are_read_and_not_trained_on", changes=[
        ("group.within(step, self.max_lag + finished.patience)", "group.within(step, self.max_lag + finished.patience + 1)"),
    ]),
    *of("trainer/rewards/server.py", f"{TR}rewards/test_server.py", changes=[
        ("if key and not hmac.compare_digest", "if not hmac.compare_digest"),
        ("return self._pending >= self._room", "return False"),
        ("replace(reward, weight=1.0)", "reward", "the score of one reward alone is its part, which has no weight"),
    ]),
]  # fmt: skip
