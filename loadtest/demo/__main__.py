"""`python -m loadtest.demo`, which `make demo` is; with `--real` it is `make demo-real`.

Exit status: 0 all went well, 1 a phase failed or the promise was not kept, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from loadtest.demo.display import Lines, Recorder, live, summary
from loadtest.demo.figures import draw, figures
from loadtest.demo.real import RealRecipe
from loadtest.demo.recipe import Course, Recipe, prepare_environment
from loadtest.demo.scene import Scene
from loadtest.demo.stage import Demo, DemoFailed
from loadtest.measure.run import with_machine
from server.up import interrupts


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    args = _parser().parse_args(argv)
    prepare_environment()
    interrupts.install()
    course: Course = RealRecipe(seed=args.seed) if args.real else Recipe(seed=args.seed)
    console, scene = Console(), Scene(course.phases)
    recorder = Recorder(course, scene, args.svg) if args.svg else None
    watchers: list[Callable[[], None]] = [recorder] if recorder else []
    watchers += [] if console.is_terminal else [Lines(course, scene, console)]
    demo = Demo(args.dir or Path("runs") / course.name, course, scene, watchers)
    try:
        _show(demo, console)
        problems = shortcomings(course, scene)
        console.print(summary(course, scene))
        if recorder is not None:
            recorder.save()
        with_machine(figures(course, scene), args.json)
        if args.chart is not None:
            draw(figures(course, scene), args.chart)
        for problem in problems:
            print(f"demo: {problem}", file=sys.stderr)
        _go_on(demo, console, keep=args.keep)
        return 1 if problems else 0
    except DemoFailed as error:
        print(error, file=sys.stderr)
        return 1
    except interrupts.Interrupted:
        print("interrupted; stopping", file=sys.stderr)
        return 130 if scene.ended is None else 0
    finally:
        interrupts.ignore()
        demo.close()


def shortcomings(course: Course, scene: Scene) -> list[str]:
    """Promises of the demo that this run did not keep; none, as a rule."""
    found = [problem] if (problem := course.shortcoming(scene)) else []
    if scene.client.lost:
        found.append(f"the client lost {scene.client.lost} requests; the first: {scene.client.first_problem}")
    if scene.swaps.aborted:
        found.append(f"{len(scene.swaps.aborted)} swaps were aborted; the first: {scene.swaps.aborted[0]}")
    return found


def _show(demo: Demo, console: Console) -> None:
    if not console.is_terminal:
        demo.run()
        return
    with live(demo.recipe, demo.scene, console):
        demo.run()


def _go_on(demo: Demo, console: Console, *, keep: bool) -> None:
    """Say how to go on; with `keep`, serve until interrupted."""
    assert demo.server is not None
    hotswap = os.path.relpath(Path(sys.executable).with_name("hotswap"))  # which may not be on the PATH
    console.print("To serve what was trained again:", highlight=False)
    for command in demo.recipe.serve_again(demo.run_dir):
        console.print(f"  {command.replace('hotswap', hotswap, 1)}", highlight=False, soft_wrap=True)
    if not keep:
        return
    asked = {"model": demo.recipe.asked(demo.scene), "prompt": demo.recipe.questions(demo.run_dir, 1)[0].prompt}
    body = json.dumps(asked | {"temperature": 0, "max_tokens": demo.recipe.short_tokens})
    console.print("It still answers, until Ctrl-C:", highlight=False)
    console.print(f"  curl -N {demo.server.url}/generate -d '{body}'", highlight=False, soft_wrap=True)
    console.print(f"  {hotswap} weights list --state-dir {demo.server.state_dir}", highlight=False, soft_wrap=True)
    console.print("The console, with the curves and swaps of this run, asks for the key in that file:", highlight=False)
    console.print(f"  {demo.server.admin_url}/console   {demo.server.admin_key_file}", highlight=False, soft_wrap=True)
    demo.server.watch()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.demo", description=__doc__)
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M-Instruct instead of a model that is made")
    parser.add_argument("--dir", type=Path, help="where models, logs and metrics go (default: runs/demo, or -real)")
    parser.add_argument("--seed", type=int, default=0, help="of the trainings and the client's questions")
    parser.add_argument(
        "--keep", action=argparse.BooleanOptionalAction, default=sys.stdin.isatty() and sys.stdout.isatty(),
        help="leave the server up afterwards, until Ctrl-C (default: on a terminal)",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, help="also save a picture and the summary here")
    parser.add_argument("--json", type=Path, help="also write the run's figures here")
    parser.add_argument("--chart", type=Path, help="also draw them here, as SVG")
    return parser


if __name__ == "__main__":
    sys.exit(main())
