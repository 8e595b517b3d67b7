"""Versions of another form: what the coordinator and an instance do about them, each rule by itself."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.gateway.fleet import routing
from tests.weightsync.codes import refused
from tests.weightsync.control.test_state import ACTIVE, SWAP, TARGET, view
from weightsync.control import agent_state
from weightsync.control.agent_state import Drain, Flip, Rest, Restart, Serve, decide
from weightsync.control.board import Board
from weightsync.control.forms import (
    BOOKKEEPING,
    GENERATION,
    KEPT,
    TEMPLATE,
    Start,
    changes,
    changes_to,
    check_config,
    completed,
    differing,
    start_of,
)
from weightsync.control.records import (
    ActiveRecord,
    ErrorInfo,
    FormRecord,
    InstanceRecord,
    Keys,
    ShareRecord,
    SplitRecord,
    StartRecord,
    SwapRecord,
    VersionRecord,
)
from weightsync.control.state import CANNOT_READ, RESTART_S, ROLLING_DRAIN_S, Ask, Step, View, Wait
from weightsync.control.state import decide as coordinate
from weightsync.control.swap import needed_versions
from weightsync.control.trial import ProbeResult
from weightsync.store.protocol import KeyValue

WHY = "lm_head.weight is new"
SERVING = {name: InstanceRecord(name, "x", "SERVING", 1, 5, form="one") for name in ("a", "b")}
OPENED = replace(SWAP, mode="rolling", drain_s=ROLLING_DRAIN_S, changes=WHY, former=ACTIVE)
TURN_S = ROLLING_DRAIN_S + RESTART_S
CANARY = replace(OPENED, phase="canary", canary="a", turn="a")
TRYING = replace(ACTIVE, trial=ShareRecord(2, 0.0, ("a",)))
COMMIT = replace(CANARY, phase="commit")
COMMITTED = ActiveRecord(2, 6, 1, "swap-2", 100.0)
REVERT = replace(COMMIT, phase="revert", turn="b", participants=("b", "a"), reason="why")
RETURNED = replace(ACTIVE, epoch=7, swap_id="swap-2")
TRIAL = InstanceRecord("a", "x", "COMMITTING", 2, 6, swap_id="swap-2", form="two")
BACK = InstanceRecord("a", "x", "SERVING", 2, 6, swap_id="swap-2", form="two")
ERROR = ErrorInfo("c", "no memory")


def fleet(**changed: InstanceRecord | None) -> dict[str, InstanceRecord]:
    return {name: record for name, record in {**SERVING, **changed}.items() if record is not None}


def step(seen: View) -> Step:
    decision = coordinate(seen)
    assert isinstance(decision, Step), decision
    return decision


# the coordinator


def test_other_tensors_open_a_rolling_swap_that_nobody_stages() -> None:
    opened = step(view(swap=None, instances=SERVING, changes=WHY))
    assert (opened.kind, opened.swap) == ("open", OPENED)
    tried = step(view(swap=OPENED, instances=SERVING))
    assert (tried.kind, tried.swap, tried.active) == ("try", CANARY, TRYING)


@pytest.mark.parametrize(
    ("instances", "advice"),
    [
        ({"a": SERVING["a"]}, "--instances 2"),
        (fleet(b=replace(SERVING["b"], restarts=False)), "b runs on several hosts"),
    ],
)
def test_a_fleet_that_could_not_serve_meanwhile_refuses(instances: dict[str, InstanceRecord], advice: str) -> None:
    refused = step(view(swap=None, instances=instances, changes=WHY))
    assert (refused.kind, refused.swap.phase, refused.active) == ("refuse", "aborted", None)
    assert WHY in (refused.swap.reason or "")
    assert advice in (refused.swap.reason or "")


def test_the_canary_may_be_away_until_its_time_is_up() -> None:
    seen = view(swap=CANARY, active=TRYING, instances=fleet(a=None))
    assert coordinate(seen) == Wait(TURN_S)
    assert coordinate(replace(seen, instances=fleet(a=InstanceRecord("a", "x")))) == Wait(TURN_S)
    late = step(replace(seen, lasted_s=TURN_S))
    why = f"canary a is not back in time; {CANNOT_READ}"
    assert (late.kind, late.active, late.swap.reason) == ("abort", ACTIVE, why)
    assert step(replace(seen, instances={"a": TRIAL})).kind == "abort", "the other one may not"


def test_the_canary_on_trial_is_probed_and_its_turn_goes_on_after_the_commit() -> None:
    seen = view(swap=CANARY, active=TRYING, instances=fleet(a=TRIAL))
    assert coordinate(seen) == Ask(CANARY, TRIAL, TURN_S)
    commit = step(replace(seen, probe=ProbeResult(True)))
    assert (commit.kind, commit.active) == ("commit", COMMITTED)
    assert (commit.swap.phase, commit.swap.turn) == ("commit", "a")
    assert step(replace(seen, probe=ProbeResult(False, "odd"))).kind == "abort"


@pytest.mark.parametrize("tried", [StartRecord("swap-2", 2, ERROR), StartRecord("before", 2, ERROR)])
def test_a_failed_start_of_this_swap_ends_it(tried: StartRecord) -> None:
    trial = coordinate(view(swap=CANARY, active=TRYING, instances=fleet(a=None), starts={"a": tried}))
    turn = replace(COMMIT, turn="b")
    later = coordinate(view(swap=turn, active=COMMITTED, instances=fleet(a=BACK, b=None), starts={"b": tried}))
    if tried.swap_id != "swap-2":
        assert (trial, later) == (Wait(TURN_S), Wait(TURN_S))
        return
    assert isinstance(trial, Step)
    assert isinstance(later, Step)
    assert (trial.kind, later.kind, later.active) == ("abort", "revert", replace(RETURNED, committed_at=100.0))
    assert "no memory" in (trial.swap.reason or "")
    assert (later.swap.phase, later.swap.participants, later.swap.turn) == ("revert", ("b", "a"), "b")


def test_a_canary_that_takes_any_form_says_which_swap_it_fails() -> None:
    """It was started before there was a version, so it flips without a restart, and has not staged for the swap."""
    leaves = agent_state.leaving(InstanceRecord("a", "x", "SERVING", error=ERROR), CANARY)
    assert (leaves.state, leaves.swap_id, leaves.error) == ("COMMITTING", "swap-2", None)
    assert isinstance(coordinate(view(swap=CANARY, active=TRYING, instances=fleet(a=leaves))), Wait)
    failed = agent_state.behind(leaves, TRYING, ERROR)
    ended = step(view(swap=CANARY, active=TRYING, instances=fleet(a=failed)))
    assert (ended.kind, ended.active, ended.swap.reason) == ("abort", ACTIVE, "instance a: no memory")


def test_turns_are_taken_one_by_one() -> None:
    seen = view(swap=COMMIT, active=COMMITTED, instances=fleet(a=TRIAL))
    assert coordinate(seen) == Wait(TURN_S), "the canary has not yet seen the commit"
    turn = step(replace(seen, instances=fleet(a=BACK)))
    assert (turn.kind, turn.swap.turn, turn.active) == ("turn", "b", None)
    assert coordinate(replace(seen, swap=turn.swap, instances=fleet(a=BACK, b=None))) == Wait(TURN_S)
    done = step(replace(seen, swap=turn.swap, instances=fleet(a=BACK, b=replace(BACK, id="b"))))
    assert (done.kind, done.swap.phase, done.swap.reason) == ("finish", "done", None)


def test_one_that_is_not_back_in_time_reverts_the_commit_unless_it_was_taken_away() -> None:
    turn = replace(COMMIT, turn="b")
    seen = view(lasted_s=TURN_S, swap=turn, active=COMMITTED, instances=fleet(a=BACK, b=None))
    assert step(replace(seen, starts={"b": StartRecord("swap-2", 1)})).kind == "revert"
    assert step(replace(seen, instances=fleet(a=BACK, b=InstanceRecord("b", "x")))).kind == "revert"
    gone = step(seen)
    assert (gone.kind, gone.swap.reason) == ("finish", "not flipped: b")


def test_a_reverted_swap_ends_aborted_when_all_are_back() -> None:
    away = view(swap=REVERT, active=RETURNED, instances=fleet(a=BACK, b=None))
    assert coordinate(away) == Wait(TURN_S)
    old = {name: replace(record, active_epoch=7) for name, record in SERVING.items()}
    turn = step(replace(away, instances={"a": BACK, "b": old["b"]}))
    assert (turn.kind, turn.swap.turn) == ("turn", "a")
    end = step(replace(away, instances=old, swap=turn.swap))
    assert (end.kind, end.swap.phase, end.swap.reason) == ("abort", "aborted", "why")


def test_the_way_back_is_kept_and_who_waits_for_its_turn_serves() -> None:
    former = replace(COMMIT, former=replace(ACTIVE, version=1, previous=7))
    assert needed_versions(COMMITTED, former, TARGET, ()) == {1, 2, 7}
    divided = replace(former, former=replace(ACTIVE, version=1, previous=7, split=SplitRecord((ShareRecord(5, 9.0),))))
    assert needed_versions(COMMITTED, divided, TARGET, ()) == {1, 2, 5, 7}
    for swap, active in ((COMMIT, COMMITTED), (REVERT, RETURNED)):
        assert routing.eligible(SERVING["b"], active, swap)
        assert routing.eligible(BACK, active, swap) == (active.epoch in (6, 7))
        assert not routing.eligible(SERVING["b"], active, replace(swap, phase="done"))


# an instance


def seen(active: ActiveRecord, swap: SwapRecord, drained: str | None = None) -> agent_state.View:
    return agent_state.View(active, swap, SERVING, drained, {1: "one", 2: "two"})


def test_an_instance_stages_nothing_for_it_and_leaves_when_it_is_its_turn() -> None:
    assert decide(SERVING["a"], seen(ACTIVE, OPENED)) == Rest()
    assert decide(SERVING["a"], seen(ACTIVE, CANARY)) == Rest(), "the commit record comes next"
    assert decide(SERVING["a"], seen(TRYING, OPENED)) == Rest(), "or the swap record"
    assert decide(SERVING["b"], seen(TRYING, CANARY)) == Rest()
    assert decide(SERVING["a"], seen(TRYING, CANARY)) == Drain(CANARY)
    leaving = replace(SERVING["a"], state="COMMITTING")
    assert decide(leaving, seen(TRYING, CANARY)) == Drain(CANARY)
    assert decide(leaving, seen(TRYING, CANARY, "swap-2")) == Restart()
    assert decide(leaving, seen(ACTIVE, replace(CANARY, phase="aborted"), "swap-2")) == Serve(ACTIVE)


def test_it_comes_back_on_trial_and_stays_if_the_swap_commits() -> None:
    started = InstanceRecord("a", "x", swap_id="swap-2", form="two")
    assert decide(started, seen(TRYING, CANARY)) == Flip(TRYING.of("a"))
    assert decide(TRIAL, seen(TRYING, CANARY)) == Rest()
    assert decide(TRIAL, seen(COMMITTED, CANARY)) == Serve(COMMITTED)
    assert decide(TRIAL, seen(COMMITTED, COMMIT)) == Serve(COMMITTED)


@pytest.mark.parametrize("record", [TRIAL, InstanceRecord("a", "x", swap_id="swap-2", form="two", error=ERROR)])
def test_it_returns_when_the_swap_is_aborted(record: InstanceRecord) -> None:
    assert decide(record, seen(ACTIVE, replace(CANARY, phase="aborted"))) == Restart()


def test_the_others_restart_in_their_turn_alone() -> None:
    assert decide(SERVING["b"], seen(COMMITTED, COMMIT)) == Rest()
    turn = replace(COMMIT, turn="b")
    assert decide(SERVING["b"], seen(COMMITTED, turn)) == Drain(turn)
    assert decide(replace(SERVING["b"], state="COMMITTING"), seen(COMMITTED, turn, "swap-2")) == Restart()
    assert decide(InstanceRecord("b", "x", swap_id="swap-2", form="two"), seen(COMMITTED, turn)) == Flip(COMMITTED)
    assert decide(BACK, seen(RETURNED, REVERT)) == Rest()
    assert decide(SERVING["b"], seen(RETURNED, REVERT)) == Serve(RETURNED)


def board(active: ActiveRecord | None, swap: SwapRecord | None = None, **starts: StartRecord) -> Board:
    keys = Keys("m")
    forms = {name: FormRecord("[]", json.dumps({"use_cache": name == "one"})) for name in ("one", "two")}
    records = {
        keys.version(n): VersionRecord(n, "ready", "", 0, "", None, None, "t", 1, 0.0, "", 0, form=form)
        for n, form in ((1, "one"), (2, "two"))
    }
    found = {key: record.to_json() for key, record in records.items()}
    found |= {keys.form(name): record.to_json() for name, record in forms.items()}
    found |= {keys.start(name): record.to_json() for name, record in starts.items()}
    found |= {keys.active: active.to_json()} if active is not None else {}
    found |= {keys.swap: swap.to_json()} if swap is not None else {}
    return Board(keys, [KeyValue(key, value, 1, 1) for key, value in found.items()], 1)


def test_a_process_starts_with_the_form_of_what_it_is_to_run() -> None:
    failed = StartRecord("swap-2", 2, ERROR)
    assert start_of(board(None, None), "a") == Start(None, None)
    assert start_of(board(ACTIVE, OPENED), "a") == Start(1, "one")
    assert start_of(board(TRYING, CANARY), "a") == Start(2, "two", "swap-2")
    assert start_of(board(TRYING, CANARY), "b") == Start(1, "one")
    assert start_of(board(TRYING, CANARY, a=StartRecord("swap-2", 1)), "a") == Start(2, "two", "swap-2")
    assert start_of(board(TRYING, CANARY, a=failed), "a") is None, "it waits for the swap to end"
    assert start_of(board(ACTIVE, replace(CANARY, phase="aborted"), a=failed), "a") == Start(1, "one")
    assert start_of(board(RETURNED, REVERT, b=failed), "b") == Start(1, "one")


# forms


def test_changes_are_told_in_words() -> None:
    def form(config: str = "", **tensors: tuple[str, list[int]]) -> FormRecord:
        return FormRecord(json.dumps([[name, *spec] for name, spec in sorted(tensors.items())]), config)

    one = form(x=("float32", [1]), y=("float32", [1]), z=("float32", [1]))
    assert changes(one, form(x=("float32", [2]), y=("int8", [1]))) == (
        "z is gone, x is of another shape, y is of another dtype"
    )
    assert changes(form(), one) == "3 tensors are new (x, ...)"
    assert changes(form(), form('{"rope_theta": 1}')) == "config.json has another text", (
        "that of the first is not known"
    )
    configs = [
        form(json.dumps(LLAMA_4 | more)) for more in ({}, {"rope_theta": 5e6, "rms_norm_eps": 1}, {"use_cache": 0})
    ]
    assert changes(configs[0], configs[1]) == "config.json has another rms_norm_eps, rope_theta"
    assert changes(configs[0], configs[2]) == "config.json has another text"


def test_a_version_of_another_form_never_takes_running_engines() -> None:
    """Engines leave for it one by one, whatever the forms differ in: without words for it all would leave at once."""
    assert changes_to(board(ACTIVE), 2)
    assert not changes_to(board(ACTIVE), 1)


# As releases 4.51 and 5.19 of transformers write the configuration of one checkpoint.
LLAMA_4 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
    "intermediate_size": 128, "max_position_embeddings": 2048, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.3", "use_cache": True, "vocab_size": 512,
}  # fmt: skip
LLAMA_5 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "dtype": "bfloat16", "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 128, "max_position_embeddings": 2048, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False,
    "transformers_version": "5.19.0", "use_cache": False, "vocab_size": 512,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
OF_META = {k: LLAMA_4[k] for k in LLAMA_4 if k not in ("head_dim", "attention_bias", "mlp_bias", "pretraining_tp")}


@pytest.mark.parametrize(
    ("served", "wanted", "keys"),
    [
        (LLAMA_4, LLAMA_5, ()),
        (OF_META, LLAMA_5, ()),  # of a release that did not write some defaults
        (LLAMA_4 | {"rope_theta": 5e5}, LLAMA_5, ("rope_parameters",)),
        (LLAMA_4 | {"rope_scaling": YARN}, LLAMA_5, ("rope_parameters",)),
        (LLAMA_4 | {"rope_scaling": YARN}, LLAMA_5 | {"rope_parameters": YARN | {"rope_theta": 10000.0}}, ()),
        (LLAMA_4, LLAMA_4 | {"hidden_act": "gelu", "rms_norm_eps": 1e-5}, ("hidden_act", "rms_norm_eps")),
        (LLAMA_5, LLAMA_5 | {"eos_token_id": [2, 3]}, ("eos_token_id",)),
        (LLAMA_5, LLAMA_5 | {"architectures": ["MistralForCausalLM"]}, ("architectures",)),
        (LLAMA_5, LLAMA_5 | {"a_key_of_nobody": 1}, ("a_key_of_nobody",)),
        ({"model_type": "of-nobody", "x": {"y": 1}}, {"model_type": "of-nobody", "x": {"y": 2}}, ("x",)),
        ({"model_type": "of-nobody", "x": {"y": 1}}, {"model_type": "of-nobody", "x": {"y": 1, "z": None}}, ()),
    ],
)
def test_configurations_differ_in_what_an_engine_reads(
    served: dict[str, Any], wanted: dict[str, Any], keys: tuple[str, ...]
) -> None:
    """The release of transformers that has written them makes no difference."""
    assert differing(json.dumps(served), json.dumps(wanted)) == keys


FAMILIES = (
    "llama mistral mixtral qwen2 qwen3 qwen3_moe qwen3_vl gemma2 gemma3 phi3 olmo2 gpt_oss glm4_moe deepseek_v3 llama4 "
    "gpt2 granite smollm3 mamba2 bamba"
)


@pytest.mark.parametrize("family", FAMILIES.split())
def test_a_configuration_that_transformers_loads_and_saves_again_is_the_same(family: str, tmp_path: Path) -> None:
    """Short or in full. Another value is told."""
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path / "first")
    loaded = AutoConfig.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "again")
    first, again = ((tmp_path / name / "config.json").read_text() for name in ("first", "again"))
    full = loaded.to_json_string(use_diff=False)
    short = json.dumps(loaded.to_diff_dict() | {"model_type": family})
    for other in (again, full, short):
        assert (differing(first, other), differing(other, first)) == ((), ())
    changed = json.loads(full) | {"tie_word_embeddings": not loaded.tie_word_embeddings}
    assert differing(first, json.dumps(changed)) == ("tie_word_embeddings",)


@pytest.mark.parametrize(
    ("served", "wanted", "keys", "kept"),
    [
        ({GENERATION: {"eos_token_id": 1}}, {GENERATION: {"eos_token_id": [1, 2]}}, ("generation_config",), False),
        ({GENERATION: {"eos_token_id": 1}}, {GENERATION: {"eos_token_id": 1, "transformers_version": "5"}}, (), False),
        ({TEMPLATE: "a"}, {TEMPLATE: "b"}, ("chat_template",), False),
        ({TEMPLATE: "a"}, {}, (), True),
        ({}, {TEMPLATE: "a"}, ("chat_template",), False),
        ({}, {GENERATION: {"eos_token_id": 2, "_from_model_config": True}}, (), False),  # as config.json has it
        ({}, {GENERATION: {"eos_token_id": 2, "temperature": 0.6}}, ("generation_config",), False),
        ({}, {GENERATION: {"eos_token_id": [2, 3]}}, ("generation_config",), False),
        ({}, {GENERATION: "text"}, ("generation_config",), False),
    ],
)
def test_what_lies_beside_a_configuration_counts_where_it_is_given(
    served: dict[str, Any], wanted: dict[str, Any], keys: tuple[str, ...], kept: bool
) -> None:
    before, after = (json.dumps(LLAMA_5 | beside, sort_keys=True) for beside in (served, wanted))
    assert differing(before, after) == keys
    assert completed(before, after) == (before if kept else after)


def test_without_transformers_names_and_defaults_of_its_releases_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    differing.cache_clear()
    kept = dict.fromkeys(BOOKKEEPING, 1)
    assert differing(json.dumps(LLAMA_4), json.dumps(LLAMA_4 | kept | {"pad_token_id": None})) == ()
    assert differing(json.dumps(LLAMA_4), json.dumps(LLAMA_5)) == ("rope_parameters", "rope_theta")
    differing.cache_clear()


def test_a_configuration_must_fit_to_the_model_directory() -> None:
    served = dict.fromkeys(KEPT, 1) | {"tie_word_embeddings": True, "num_hidden_layers": 2}
    check_config(json.dumps(served), json.dumps(served | {"tie_word_embeddings": False, "quantization_config": {}}))
    for name in KEPT:
        with refused("config_mismatch", match=name):
            check_config(json.dumps(served), json.dumps(served | {name: 2}))
    with refused("config_mismatch", match="not JSON"):
        check_config(json.dumps(served), "{")


def test_a_form_is_named_by_all_it_says() -> None:
    assert len({FormRecord(t, c).digest for t in ("a", "b") for c in ("", "{}")}) == 4
