"""`python -m loadtest.demo`, which `make demo` is.

Exit status: 0 all went well, 1 a phase failed or the promise was not kept, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from loadtest.demo.display import Lines, Recorder, live, summary
from loadtest.demo.scene import ENGINE_ARGS, Recipe, Scene, prepare_environment
from loadtest.demo.stage import Demo, DemoFailed
from server.cli import interrupts

LEAST_GAIN = 20.0  # points of held-out accuracy that GRPO alone must bring


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    args = _parser().parse_args(argv)
    prepare_environment()
    interrupts.install()
    console, scene = Console(), Scene()
    recorder = Recorder(scene, args.svg) if args.svg else None
    watchers: list[Callable[[], None]] = [recorder] if recorder else []
    watchers += [] if console.is_terminal else [Lines(scene, console)]
    demo = Demo(args.dir, Recipe(seed=args.seed), scene, watchers)
    try:
        _show(demo, console)
        problems = shortcomings(scene)
        console.print(summary(scene))
        if recorder is not None:
            recorder.save()
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


def shortcomings(scene: Scene) -> list[str]:
    """What the demo promises and this run did not keep; nothing, as a rule."""
    found = []
    if scene.gain < LEAST_GAIN:
        found.append(f"GRPO brought {scene.gain:+.1f} points, fewer than {LEAST_GAIN:.0f}")
    if scene.client.lost:
        found.append(f"the client lost {scene.client.lost} requests; the first: {scene.client.first_problem}")
    if scene.swaps.aborted:
        found.append(f"{len(scene.swaps.aborted)} swaps were aborted; the first: {scene.swaps.aborted[0]}")
    return found


def _show(demo: Demo, console: Console) -> None:
    if not console.is_terminal:
        demo.run()
        return
    with live(demo.scene, console):
        demo.run()


def _go_on(demo: Demo, console: Console, *, keep: bool) -> None:
    """Say how to go on; with `keep`, serve until interrupted."""
    assert demo.server is not None
    final = demo.run_dir / "final"
    console.print(f"The trained model is in {final}. To serve it again:", highlight=False)
    console.print(f"  hotswap up --model {final} {' '.join(ENGINE_ARGS)}", highlight=False, soft_wrap=True)
    if not keep:
        return
    body = '{"prompt": "2+3+4=", "temperature": 0, "max_tokens": 4}'
    console.print("It still answers, until Ctrl-C:", highlight=False)
    console.print(f"  curl -N {demo.server.url}/generate -d '{body}'", highlight=False, soft_wrap=True)
    console.print(f"  hotswap weights list --state-dir {demo.server.state_dir}", highlight=False, soft_wrap=True)
    console.print("The console, with the curves and swaps of this run, asks for the key in that file:", highlight=False)
    console.print(f"  {demo.server.admin_url}/console   {demo.server.admin_key_file}", highlight=False, soft_wrap=True)
    demo.server.watch()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.demo", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="where models, logs and metrics go")
    parser.add_argument("--seed", type=int, default=0, help="of the trainings and the client's questions")
    parser.add_argument(
        "--keep", action=argparse.BooleanOptionalAction, default=sys.stdin.isatty() and sys.stdout.isatty(),
        help="leave the server up afterwards, until Ctrl-C (default: on a terminal)",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, help="also save a picture and the summary here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
