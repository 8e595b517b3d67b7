"""The training loop. The functions that it calls are in run.py; the objective is in the algorithm."""

from __future__ import annotations

from trainer.errors import Diverged
from trainer.metrics.throughput import Stopwatch
from trainer.rollouts.experience import TrainState
from trainer.run import Run


def train(run: Run) -> TrainState:
    """Train to the configured step and return the final state. Collective: every rank runs it."""
    state = run.start()
    if run.algorithm.samples_per_prompt or run.config.eval:
        state = run.publish_again(state)  # the first answers must come from these very weights
    run.evaluate(state, first=True)
    while state.step < run.config.steps:
        run.may_leave(state)
        watch = Stopwatch()
        batch = run.experience.step(state, watch)
        try:
            with watch("train"):
                stats = run.train(batch)
        except Diverged as error:
            state = run.roll_back(state, error)
            continue
        state = state.after_step(batch.records)
        with watch("publish"):
            state, published = run.publish(state) if run.due("publish", state) else (state, {})
        run.report(state, batch, stats, published, watch)
        run.evaluate(state)
        if run.due("checkpoint", state):
            run.checkpoint(state)
        run.export(state)
    run.finish(state)
    return state
