"""The scene as a picture: live on a terminal, a line now and then elsewhere, and a summary at the end."""

from __future__ import annotations

import colorsys
import io
import re
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.demo.recipe import Course
from loadtest.demo.scene import Answer, Piece, Scene

BARS = "▁▂▃▄▅▆▇█"
FETCHED = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)  # a picture in a README asks nobody for fonts
WIDTH = 110  # of a recorded picture
HISTORY = 6  # answers of one sum
GOLDEN = 0.618034


def live(course: Course, scene: Scene, console: Console) -> Live:
    """A live picture; on something that is no terminal rich shows its last state only."""
    return Live(get_renderable=lambda: picture(course, scene), console=console, refresh_per_second=4, transient=True)


class Lines:
    """Progress as lines, for logs."""

    def __init__(self, course: Course, scene: Scene, console: Console) -> None:
        self._every, self._scene, self._console, self._said = course.line_every, scene, console, ""

    def __call__(self) -> None:
        scene = self._scene
        key = f"{scene.phase} {scene.step // self._every}"
        if key != self._said:
            self._said = key
            parts = [f"{scene.seconds:5.0f} s  {scene.phase:9}  step {scene.step:3}/{scene.steps}", _learning(scene)]
            self._console.print("  ".join([*parts, _swap(scene), _client(scene)]), highlight=False, soft_wrap=True)


class Recorder:
    """Takes the picture half way through the last training, and with the summary saves it as SVG."""

    def __init__(self, course: Course, scene: Scene, path: Path) -> None:
        self._course, self._scene, self._path, self._taken = course, scene, path, False
        self._console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")

    def __call__(self) -> None:
        if not self._taken and self._scene.phase == "improve" and 0 < self._scene.steps <= 2 * self._scene.step:
            self._taken = True
            self._console.print(picture(self._course, self._scene))

    def save(self) -> None:
        self._console.print(summary(self._course, self._scene))
        svg = self._console.export_svg(title=f"make {self._course.name}")
        self._path.write_text(FETCHED.sub("", svg))


def picture(course: Course, scene: Scene) -> RenderableType:
    """Everything that is known, in one panel."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("phase", _phases(scene))
    grid.add_row("step", _progress(scene))
    grid.add_row("learning", _learning(scene))
    grid.add_row("reward", _sparkline(scene.rewards))
    grid.add_row("accuracy", _accuracy(course, scene))
    grid.add_row("swap", _swap(scene))
    grid.add_row("client", _client(scene))
    grid.add_row("", "")
    shown = scene.client.crossing or scene.client.live
    grid.add_row("a stream", _pieces(shown.pieces if shown else []))
    grid.add_row("written by", _legend(shown.pieces if shown else []))
    grid.add_row("", "")
    for prompt, history in list(scene.client.sums.items()):
        grid.add_row(prompt, _history(history[-HISTORY:]))
    return Panel(grid, title="[bold]hotswap[/] demo", subtitle=f"{scene.seconds:.0f} s", border_style="cyan")


def summary(course: Course, scene: Scene) -> RenderableType:
    """The results of the demo; every number was measured in this run."""
    client, swaps = scene.client, scene.swaps
    table = Table(title=f"{scene.seconds:.0f} s, from no model to a better one", show_header=False, min_width=72)
    table.add_column(style="dim")
    table.add_column()
    for moment, label in course.moments.items():
        table.add_row(f"accuracy, {label}", f"{scene.accuracy.get(moment, 0.0):.1%} of {course.unit}")
    table.add_row("GRPO alone", f"[bold green]{scene.gain:+.1f} points[/]")
    table.add_row("versions swapped in", f"{len(swaps.done)}, of which {len(set(scene.published))} by training")
    for name, label in (("stage_ms", "staging"), ("commit_ms", "commit")):
        table.add_row(label, f"{swaps.median(name):.2f} ms median, {swaps.longest(name):.2f} ms longest")
    longest, when = client.longest
    gaps = f"{client.gap_ms(0.99):.1f} ms p99, {longest:.0f} ms longest (after {when:.0f} s)"
    table.add_row("gap between tokens", gaps)
    table.add_row("client", f"{client.answers} answers, {client.tokens} tokens")
    table.add_row("streams across a swap", f"{client.crossed}, up to {client.most_versions} versions in one")
    lost = f"{client.failed} failed, {client.truncated} truncated, {client.misattributed} misattributed"
    table.add_row("lost requests", f"[{'red' if client.lost else 'bold green'}]{lost}[/]")
    return table


def colour(version: int) -> str:
    """A colour for a weight version, far from its neighbours'."""
    red, green, blue = colorsys.hsv_to_rgb(version * GOLDEN % 1.0, 0.55, 0.95)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def _phases(scene: Scene) -> Text:
    text, current = Text(), scene.phases.index(scene.phase)
    for i, phase in enumerate(scene.phases[:-1]):
        mark, style = ("✓", "green") if i < current else ("▶", "bold") if i == current else ("·", "dim")
        text.append(f"{mark} {phase}   ", style)
    return text


def _progress(scene: Scene) -> RenderableType:
    bar = Table.grid(padding=(0, 1))
    total = max(scene.steps, 1)
    pulse = not scene.steps and scene.phase != scene.phases[-1]
    bar.add_row(ProgressBar(total, scene.step, width=40, pulse=pulse), f"{scene.step}/{scene.steps}")
    return bar


def _learning(scene: Scene) -> str:
    m = scene.metrics
    if not m:
        return "-"
    reward = f"reward {m['reward_mean']:.2f}  " if "reward_mean" in m else ""
    return f"{reward}loss {m['loss']:+.3f}  version {m['version']}  {m['tokens_per_s']:.0f} trained tokens/s"


def _sparkline(values: list[float], width: int = 60) -> Text:
    """The last `width` values between 0 and 1."""
    bars = "".join(BARS[min(int(v * len(BARS)), len(BARS) - 1)] for v in values[-width:])
    return Text(bars, style="green")


def _accuracy(course: Course, scene: Scene) -> Text:
    text = Text()
    for moment, label in course.moments.items():
        value = f"{scene.accuracy[moment]:.0%}" if moment in scene.accuracy else "…"
        text.append(f"{label} ", "dim").append(f"{value}   ", "bold")
    return text


def _swap(scene: Scene) -> str:
    last = scene.swaps.last
    if last is None:
        return "-"
    times = f"staged in {last.stage_ms:.1f} ms, committed in {last.commit_ms:.2f} ms"
    return f"version {last.version}: {times}  ({len(scene.swaps.done)} so far)"


def _client(scene: Scene) -> str:
    c = scene.client
    rates = f"{c.tokens_per_s():.0f} tokens/s  longest gap {c.longest[0]:.0f} ms"
    return f"{rates}  {c.answers} answers  {c.failed} failed  {c.truncated} truncated"


def _pieces(pieces: Iterable[Piece]) -> Text:
    text = Text(overflow="fold")
    for piece in list(pieces):
        text.append(piece.text, colour(piece.version))
    return text


def _legend(pieces: Iterable[Piece]) -> Text:
    text = Text()
    for piece in list(pieces):
        text.append(f"v{piece.version} ", colour(piece.version))
    return text


def _history(answers: list[Answer]) -> Text:
    """How the answer to one question changed, each with the version that first gave it."""
    text = Text()
    for answer in answers:
        mark, style = ("✓", "green") if answer.right else ("✗", "red")
        text.append_text(_pieces(answer.pieces)).append(mark, style)
        text.append(f" v{answer.pieces[-1].version}   ", "dim")
    return text
