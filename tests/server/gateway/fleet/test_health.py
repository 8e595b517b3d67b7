"""Circuit and retry budget as plain state, at made-up times."""

from __future__ import annotations

import random

import pytest

from loadtest.simulation.clock import Clock
from server.gateway import HealthSettings, UpstreamSettings
from server.gateway.fleet.instance import FAULTS, STATES, Health
from server.gateway.fleet.retries import MIN_PER_S, NEVER_AGAIN, WINDOW_S, RetryBudget, again
from server.gateway.fleet.routing import Need
from server.gateway.fleet.view import Fleet
from server.gateway.observe.stats import Stats
from weightsync.control.records import InstanceRecord

SETTINGS = HealthSettings()
NOW = 1e5


def ejected(times: int = 1, settings: HealthSettings = SETTINGS) -> Health:
    health = Health(settings)
    for _ in range(times):
        health.eject(NOW)
    return health


def test_it_takes_some_failures_in_a_row() -> None:
    health = Health(SETTINGS)
    for n in range(SETTINGS.eject_after - 1):
        assert not health.failure(NOW + n)
    health.success(NOW)
    for n in range(SETTINGS.eject_after - 1):
        assert not health.failure(NOW + n)
    assert health.failure(NOW + 5)
    assert health.well, "whether it is ejected is for the fleet to say"


def test_it_takes_many_failures_among_answers() -> None:
    """Every second one fails: never many in a row, but half of the window's."""
    health = Health(SETTINGS)
    outcomes = []
    for n in range(SETTINGS.min_requests + 2):  # the first answer is of an older window
        if n % 2:
            outcomes.append(health.failure(NOW + n / 10))
        else:
            health.success(NOW + n / 10)
    assert outcomes == [False] * (len(outcomes) - 1) + [True]


def test_failures_of_long_ago_do_not_count() -> None:
    health = Health(SETTINGS)
    for n in range(200):
        health.success(NOW + n * SETTINGS.window_s)
        assert not health.failure(NOW + n * SETTINGS.window_s + 0.1)


def test_an_ejection_ends_with_trials() -> None:
    health = Health(SETTINGS)
    seconds = health.eject(NOW)
    assert (seconds, health.state(NOW), health.admits(NOW + seconds - 0.01)) == (SETTINGS.ejection_s, "open", False)
    later = NOW + seconds
    assert health.state(later) == "half_open"
    assert health.admits(later)
    health.asked(later)
    assert not health.admits(later + 0.5), "one at a time"
    assert not health.success(later + 0.5)
    assert health.admits(later + SETTINGS.trial_interval_s)
    assert health.success(later + 1.5)
    assert (health.state(later + 2), health.well) == ("closed", True)


def test_answers_to_what_was_asked_before_prove_nothing() -> None:
    health = ejected()
    assert not any(health.success(NOW + 1) for _ in range(10))
    assert health.state(NOW + 1) == "open"
    assert not health.failure(NOW + 1), "nor do failures make it worse"


def test_a_failed_trial_doubles_the_time() -> None:
    health = ejected()
    assert health.failure(health.until)
    assert health.eject(health.until) == 2 * SETTINGS.ejection_s
    times = [health.eject(health.until) for _ in range(10)]
    assert times[-1] == SETTINGS.max_ejection_s
    assert health.ejections == 12


def test_a_good_time_makes_the_next_ejection_a_first_one() -> None:
    health = ejected(3)
    at = health.until
    assert [health.success(at), health.success(at)] == [False, True]
    assert health.eject(at + SETTINGS.forgive_s / 2) == 8 * SETTINGS.ejection_s
    at = health.until
    assert [health.success(at), health.success(at)] == [False, True]
    assert health.eject(at + SETTINGS.forgive_s + 1) == SETTINGS.ejection_s


@pytest.mark.parametrize(("ejections", "state"), [(0, "closed"), (1, "half_open")])
def test_probes_take_it_out_and_back(ejections: int, state: str) -> None:
    health = ejected(ejections)
    at = max(NOW, health.until)
    for n in range(SETTINGS.unhealthy_after):
        assert health.admits(at + n)
        health.probed(well=False)
    assert (health.admits(at), health.state(at)) == (False, state)
    health.probed(well=True)
    assert health.admits(at)


def test_any_history_leaves_a_state_that_can_be_left() -> None:
    rng = random.Random(4)
    for _ in range(300):
        health, now = Health(SETTINGS), NOW
        for _ in range(60):
            now += rng.choice([0.0, 0.1, 3.0, 40.0])
            step = rng.randrange(5)
            if step == 0:
                health.success(now)
            elif step == 1 and health.failure(now):
                assert 0 < health.eject(now) <= SETTINGS.max_ejection_s
            elif step == 2:
                health.probed(well=rng.random() < 0.5)
            elif health.admits(now):
                health.asked(now)
            assert health.state(now) in STATES
        health.probed(well=True)
        end = max(now, health.until) + SETTINGS.trial_interval_s
        assert health.admits(end)
        for n in range(SETTINGS.trials):
            health.success(end + n)
        assert health.well


def test_faults_are_the_instances_own() -> None:
    assert FAULTS.isdisjoint(range(200, 500))
    assert 501 not in FAULTS


# retries


def test_the_budget_is_a_share_of_the_requests_and_a_little_more() -> None:
    budget = RetryBudget(0.2)
    reserve = int(MIN_PER_S * WINDOW_S)
    budget.left(NOW)
    assert sum(budget.take(NOW) for _ in range(1000)) == reserve
    budget.requests += 1000
    granted = int(200 + MIN_PER_S)
    assert sum(budget.take(NOW + 1) for _ in range(1000)) == granted
    assert budget.exhausted == 2000 - reserve - granted


def test_an_empty_bucket_fills_with_time_up_to_what_the_window_gives() -> None:
    budget = RetryBudget(0.2)
    while budget.take(NOW):
        pass
    assert not budget.take(NOW + 0.9 / MIN_PER_S)
    assert budget.take(NOW + 1.1 / MIN_PER_S)
    assert budget.left(NOW + 1000) == pytest.approx(MIN_PER_S * WINDOW_S)


def test_requests_of_long_ago_count_by_their_rate() -> None:
    """An hour of one request a second does not pay for an hour's retries at once."""
    budget = RetryBudget(0.5)
    budget.left(NOW)
    budget.requests += 3600
    taken = sum(budget.take(NOW + 3600) for _ in range(4000))
    assert taken == int(0.5 * WINDOW_S + MIN_PER_S * WINDOW_S)


def test_in_a_storm_retries_stay_a_share_of_the_load() -> None:
    budget, now, asked, retried = RetryBudget(0.2), NOW, 0, 0
    for _ in range(60_000):  # a minute in which everything fails
        now += 0.001
        budget.requests += 1
        asked += 1
        retried += again("lost", "/generate", 0, budget, now)
    assert retried <= 0.2 * asked + MIN_PER_S * 60 + MIN_PER_S * WINDOW_S
    assert retried >= 0.19 * asked, "and the share is really granted"


@pytest.mark.parametrize(
    ("failure", "route", "lost_before", "is_sent_again"),
    [
        ("not_sent", "/v1/chat/completions", 3, True),
        ("not_sent", "/v1/responses", 0, True),
        ("refused", "/generate", 3, True),
        ("lost", "/generate", 0, True),
        ("lost", "/v1/models", 0, True),
        ("lost", "/generate", 1, False),
        ("lost", "/v1/responses", 0, False),
        ("broken", "/generate", 0, False),
    ],
)
def test_what_is_sent_again(failure: str, route: str, lost_before: int, is_sent_again: bool) -> None:
    assert again(failure, route, lost_before, RetryBudget(0.2), NOW) is is_sent_again  # type: ignore[arg-type]


def test_without_a_budget_nothing_that_was_lost_is_sent_again() -> None:
    budget = RetryBudget(0.2)
    budget.left(NOW)
    while budget.take(NOW):
        pass
    assert not again("lost", "/generate", 0, budget, NOW)
    assert again("not_sent", "/generate", 0, budget, NOW), "it has cost nobody work"


def test_routes_that_are_never_repeated_exist() -> None:
    from server.gateway.routes import public_names

    assert set(public_names()) >= NEVER_AGAIN


# the fleet's part


def test_who_is_out_is_no_other_to_send_a_lost_request_to() -> None:
    fleet = Fleet(None, "toy", UpstreamSettings(), Stats())  # type: ignore[arg-type]
    for n in range(2):
        fleet._put_instance(
            InstanceRecord(f"i{n}", f"http://127.0.0.1:{n + 1}", "SERVING", active_version=1, active_epoch=1)
        )
    fleet._changed()
    lost, other = fleet.serving
    assert fleet.has_other([lost], None)
    assert not fleet.has_other([lost], Need(2, None, 0.0))
    while other.health.answering:
        fleet.probed(other, well=False)
    assert not fleet.has_other([lost], None)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_somebody_is_asked_and_not_too_many_are_left_out(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rng = Clock(NOW), random.Random(seed)
    monkeypatch.setattr("server.gateway.fleet.view.time.monotonic", lambda: clock.now)
    fleet = Fleet(None, "toy", UpstreamSettings(), Stats())  # type: ignore[arg-type]
    for n in range(rng.randrange(1, 7)):
        record = InstanceRecord(f"i{n}", f"http://127.0.0.1:{n + 1}", "SERVING", active_version=1, active_epoch=1)
        fleet._put_instance(record)
    fleet._changed()
    most = max(1, int(SETTINGS.max_ejected * len(fleet.serving)))
    failing = {i.id for i in fleet.serving if rng.random() < 0.6}
    for step in range(2000):
        clock.now += rng.choice([0.0, 0.01, 0.5, 3.0])
        if step == 1500:
            failing.clear()
        i = fleet.pick()
        assert i is not None
        if i.id in failing and rng.random() < 0.9:
            fleet.connect_failed(i) if rng.random() < 0.3 else fleet.answered(i, 500)
        else:
            fleet.answered(i, 200)
        if rng.random() < 0.1:
            probed = rng.choice(fleet.serving)
            fleet.probed(probed, well=probed.id not in failing or rng.random() < 0.5)
        out = [j for j in fleet.serving if not j.health.closed]
        assert len(out) <= most
        assert len(out) < len(fleet.serving)
        assert fleet.unwell == [j for j in fleet.serving if not j.health.well]
    for j in fleet.serving:
        fleet.probed(j, well=True)
    for _ in range(1000):
        clock.now += 1.0
        picked = fleet.pick()
        assert picked is not None
        fleet.answered(picked, 200)
    assert fleet.unwell == [], "when nobody fails any more, all are back"
