"""The demos' parts without an engine: what they read, check, count and show."""

from __future__ import annotations

import json
import math
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from loadtest.demo import Demo, DemoFailed, RealRecipe, Recipe, Scene
from loadtest.demo.__main__ import _go_on, shortcomings
from loadtest.demo.client import Misattributed, check_spans
from loadtest.demo.display import Recorder, colour, picture
from loadtest.demo.figures import draw, figures
from loadtest.demo.learn import POLICY, SUMS, Seen
from loadtest.demo.recipe import Question
from loadtest.demo.scene import Answer, Swap
from loadtest.demo.stage import MetricsTail, Training
from server.gateway.release.policy import GUARDS, parse
from server.up import interrupts
from server.up.processes import Child
from trainer.config import TrainerConfig, strict

STARTS = ("server.gateway", "server.cli instance", "trainer.main", "weightsync.push", "weightsync.persist")


def test_recipes_are_configurations_the_trainer_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_STORE", "sqlite:///nowhere/store.db")
    made = (Recipe(seed=7).sft, Recipe(seed=7).grpo, RealRecipe(seed=7).grpo)
    *toys, real = (strict.build(TrainerConfig, config(tmp_path, "http://127.0.0.1:1")) for config in made)
    assert [config.seed for config in (*toys, real)] == [7, 7, 7]
    assert (real.served_name, real.best_by) == ("sums", ("held_out", "accuracy"))
    assert RealRecipe().phases == ("build", "serve", "improve", "done")


def test_spans_must_cover_the_tokens_and_agree_with_every_event() -> None:
    spans = [{"version": 3, "start": 0, "end": 4}, {"version": 4, "start": 4, "end": 6}]
    check_spans(spans, [(1, 3), (4, 3), (6, 4)])
    check_spans(spans, [(5, 4), (6, 4)])  # one event may carry tokens of two versions: it names the last
    for marks in ([(5, 3), (6, 4)], [(4, 3)], [(6, 4), (7, 4)], [(4, 4), (6, 4)]):
        with pytest.raises(Misattributed):
            check_spans(spans, marks)


def test_a_metrics_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    tail = MetricsTail(file)
    assert tail.read() == []
    file.write_text('{"event":"a"}\n{"event":"b"}\n{"eve')
    assert [e["event"] for e in tail.read()] == ["a", "b"]
    assert tail.read() == []
    with file.open("a") as stream:
        stream.write('nt":"c"}\n')
    assert [e["event"] for e in tail.read()] == ["c"]


def finished(fine_tuned: float = 0.3, improved: float = 0.9) -> Scene:
    scene = Scene()
    about = {"event": "eval", "set": "held_out", "version": 2, "prompts": 40}
    scene.enter("fine-tune")
    scene.read({"event": "start", "steps": 2})
    scene.read(about | {"step": 0, "accuracy": 0.0})
    scene.read({"event": "step", "step": 2, "version": 2, "loss": 1.5, "tokens_per_s": 10.0})
    scene.read(about | {"step": 2, "accuracy": fine_tuned})
    scene.enter("improve")
    scene.read({"event": "start", "steps": 2})
    scene.read(about | {"step": 0, "accuracy": fine_tuned})
    for step in (1, 2):
        numbers = {"version": 3 + step, "loss": 0.0, "tokens_per_s": 9.0, "reward_mean": 0.5}
        scene.read({"event": "step", "step": step} | numbers)
    scene.read(about | {"step": 2, "accuracy": improved})
    scene.swaps.done.append(Swap(version=5, epoch=5, stage_ms=12.0, commit_ms=0.05))
    scene.enter("done")
    return scene


def test_a_scene_knows_which_accuracy_is_which() -> None:
    scene = finished(fine_tuned=0.3, improved=0.9)
    assert scene.accuracy == {"start": 0.0, "fine-tuned": 0.3, "improved": 0.9}
    assert scene.gain == pytest.approx(60.0)
    assert scene.published == [2, 4, 5]


def test_what_was_promised_and_not_kept_is_said() -> None:
    assert shortcomings(Recipe(), finished()) == []
    scene = finished(fine_tuned=0.8, improved=0.9)
    scene.client.problem("truncated", "no `done` after 3 tokens")
    scene.swaps.aborted.append("version 4: instance i is gone")
    learning, client, swaps = shortcomings(Recipe(), scene)
    assert "+10.0 points" in learning
    assert "lost 1 requests" in client
    assert "no `done` after 3 tokens" in client
    assert "instance i is gone" in swaps


def test_an_answer_is_kept_only_when_it_changes() -> None:
    stats = Scene().client
    for version, text in ((1, "09"), (2, "09"), (5, "08"), (6, "08"), (7, "09")):
        answer = Answer("3+4+1=")
        answer.add(version, text[0])
        answer.add(version, text[1])
        stats.answered(answer)
    kept = [(a.pieces[0].version, a.text) for a in stats.sums["3+4+1="]]
    assert kept == [(1, "09"), (5, "08"), (7, "09")]


def test_gaps_are_summed_up() -> None:
    stats = Scene().client
    assert (stats.gap_ms(0.99), stats.longest[0]) == (0.0, 0.0)
    for seconds in (0.001, 0.003, 0.002):
        stats.gap(seconds)
    assert stats.gap_ms(0.5) == pytest.approx(2.0)
    assert stats.longest[0] == pytest.approx(3.0)
    swaps = Scene().swaps
    swaps.done.append(Swap(version=1, epoch=1, stage_ms=9000.0, commit_ms=9.0))  # the start of the server
    assert math.isnan(swaps.median("stage_ms"))
    swaps.done.append(Swap(version=2, epoch=2, stage_ms=12.0, commit_ms=0.05))
    assert (swaps.longest("stage_ms"), swaps.median("commit_ms")) == (12.0, 0.05)


def test_a_scene_of_which_nothing_is_known_can_be_shown() -> None:
    """One that has ended stands in the recorded picture."""
    console = Console(width=110, record=True)
    console.print(picture(Recipe(), Scene()))
    assert "hotswap demo" in console.export_text()
    assert len({colour(version) for version in range(1, 9)}) == 8, "of neighbouring versions"


def test_a_recorded_picture_needs_nothing_from_the_network(tmp_path: Path) -> None:
    scene = finished()
    recorder = Recorder(Recipe(), scene, tmp_path / "demo.svg")
    scene.phase = "improve"
    recorder()
    recorder()  # one picture is enough
    recorder.save()
    svg = (tmp_path / "demo.svg").read_text()
    assert svg.count("hotswap") == 1
    assert "+60.0" in svg
    assert "points" in svg
    assert re.findall(r"https?://[^\s\"]+", svg) == ["http://www.w3.org/2000/svg"]


@pytest.mark.broad
def test_two_demos_do_not_share_a_directory(tmp_path: Path) -> None:
    first, second = (Demo(tmp_path, Recipe(), Scene()) for _ in range(2))
    try:
        first.build()
        assert (tmp_path / "model" / "model.safetensors").exists()
        with pytest.raises(DemoFailed, match="another demo runs in"):
            second.build()
    finally:
        first.close()
        second.close()
    assert not list(tmp_path.glob("state/*"))


def test_the_first_training_begins_while_the_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its measurements meanwhile are shown in its own phase."""
    demo, order = Demo(tmp_path, Recipe(), Scene()), list[str]()

    def begin(name: str) -> Training:
        order.append(f"{name} begins in {demo.scene.phase}")
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"event": "start", "steps": 7}) + "\n")
        ended = SimpleNamespace(alive=False, process=SimpleNamespace(returncode=0))
        return Training(cast(Child, ended), MetricsTail(tmp_path / f"{name}.jsonl"))

    def serve(first: str) -> Training:
        demo.scene.enter("serve")
        return begin(first)

    def watch(phase: str, metrics: MetricsTail) -> None:
        order.extend(f"{event['event']} in {demo.scene.phase}" for event in metrics.read())

    told = {"build": lambda: None, "settle": lambda: None, "begin": begin, "serve": serve, "_watch": watch}
    for name, instead in told.items():
        monkeypatch.setattr(demo, name, instead)
    demo.run()
    assert order == ["sft begins in serve", "start in fine-tune", "grpo begins in fine-tune", "start in improve"]


@pytest.mark.parametrize("number", interrupts.NUMBERS)
def test_an_interrupt_waits_for_what_must_not_be_interrupted(number: signal.Signals) -> None:
    former = {n: signal.getsignal(n) for n in interrupts.NUMBERS}
    started = []

    def start() -> None:
        with interrupts.held():
            signal.raise_signal(number)
            started.append("a process")

    try:
        interrupts.install()
        with pytest.raises(interrupts.Interrupted):
            start()
        assert started
        with pytest.raises(interrupts.Interrupted):
            signal.raise_signal(number)
        interrupts.ignore()
        signal.raise_signal(number)
    finally:
        for n, handler in former.items():
            signal.signal(n, handler)


def real(*accuracies: float, greedy: tuple[float, ...] | None = None) -> Scene:
    recipe = RealRecipe()
    scene = Scene(recipe.phases)
    scene.enter("improve")
    scene.read({"event": "start", "steps": 40})
    for step, accuracy in enumerate(accuracies):
        about = {"event": "eval", "step": 4 * step, "version": step + 2, "prompts": 32}
        scene.read(about | {"set": "held_out", "accuracy": accuracy, "pass_at_4": min(1.0, 2 * accuracy)})
        if greedy is None or step < len(greedy):
            scene.read(about | {"set": "greedy", "accuracy": greedy[step] if greedy is not None else 0.5})
        numbers = {"version": step + 3, "loss": 0.0, "tokens_per_s": 9.0, "reward_mean": accuracy}
        scene.read({"event": "step", "step": 4 * step + 1} | numbers)
    return scene


def test_the_real_demo_ends_when_held_out_accuracy_has_doubled() -> None:
    recipe = RealRecipe()
    assert not recipe.enough(real())
    assert not recipe.enough(real(0.2))
    assert not recipe.enough(real(0.2, 0.39))
    assert recipe.enough(real(0.2, 0.3, 0.4))
    assert not recipe.enough(real(0.02, 0.05))  # that is luck
    assert "from 20.0% to 39.0%" in recipe.shortcoming(real(0.2, 0.39))
    assert real(0.2, 0.4).gain == pytest.approx(20.0)
    assert not recipe.enough(real(0.2, 0.4, greedy=(0.3,)))
    assert "still to come" in recipe.shortcoming(real(0.2, 0.4, greedy=(0.3,)))
    assert "fell from 30.0% to 29.0%" in recipe.shortcoming(real(0.2, 0.4, greedy=(0.3, 0.29)))
    assert recipe.enough(real(0.2, 0.3, 0.4, greedy=(0.3, 0.2, 0.3)))


def test_clients_ask_for_the_adapter_once_it_answers() -> None:
    recipe = RealRecipe()
    assert recipe.asked(Scene(recipe.phases)) == "smollm2"
    assert recipe.asked(real(0.2)) == "sums"


def test_an_answer_is_right_when_its_last_number_is() -> None:
    question = Question("4 - 6 =", "...", "-2")
    for text, right in (("-2", True), ("4 - 6 = -2.", True), ("2", False), ("-2 or 3", False), ("none", False)):
        assert RealRecipe().right(text, question) == right


def test_the_figures_of_a_run_can_be_drawn_from_their_file(tmp_path: Path) -> None:
    scene = real(0.2, 0.3, 0.4)
    scene.swaps.done.append(Swap(version=5, epoch=5, stage_ms=12.0, commit_ms=0.05))
    scene.enter("done")
    found = json.loads(json.dumps(figures(RealRecipe(), scene)))
    assert [event["accuracy"] for event in found["evals"] if event["set"] == "held_out"] == [0.2, 0.3, 0.4]
    for name in ("one.svg", "two.svg"):
        draw(found, tmp_path / name)
    one, two = ((tmp_path / name).read_text() for name in ("one.svg", "two.svg"))
    assert one == two  # equal figures, equal files
    assert "<!-- held_out, pass@4 -->" in one


def test_the_commands_it_ends_with_work_from_where_it_was_started(tmp_path: Path) -> None:
    server = SimpleNamespace(url="http://a", admin_url="http://b", state_dir=tmp_path, admin_key_file=tmp_path / "key")
    server.watch = lambda: None
    recipe = RealRecipe(seed=1)
    known = {name: getattr(recipe, name) for name in ("asked", "serve_again", "short_tokens")}
    course = SimpleNamespace(**known, questions=lambda *_: [SimpleNamespace(prompt="1 + 1 =")])
    demo = SimpleNamespace(server=server, recipe=course, run_dir=tmp_path, scene=Scene(recipe.phases))
    console = Console(record=True, width=400)
    _go_on(demo, console, keep=True)  # type: ignore[arg-type]
    said = console.export_text()
    commands = re.findall(r"^  (\S*hotswap) (?:up|weights push|weights list) ", said, re.MULTILINE)
    here = Path(sys.executable).parent.resolve()
    assert [Path(command).absolute().parent.resolve() for command in commands] == [here] * 3, said


def test_users_correct_what_a_policy_releases() -> None:
    """Accuracy is of the answers that they got."""
    assert [step.traffic for step in parse(POLICY).steps] == [0, 20, 50]
    assert len(parse(POLICY).of_step(2)) == 3 + len(GUARDS)
    seen = Seen()
    assert seen.accuracy(1) == 0.0
    seen.answers[1], seen.right[1] = 8, 2
    assert seen.accuracy(1) == 0.25
    assert len(SUMS) == 216
