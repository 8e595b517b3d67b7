"""`python -m loadtest.demo.console_shot`: the picture of the console in docs/, taken while the demo's model learns.

The demo (loadtest/demo) runs as ever. When its reinforcement begins, a headless Chromium opens the console and signs
in; half-way it asks for answers until one of them was written by several weight versions. Needs Chromium
(scripts/debian.sh) and Playwright (requirements/test.txt).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from loadtest.demo.client import SILENT
from loadtest.demo.recipe import Recipe, prepare_environment
from loadtest.demo.scene import Scene
from loadtest.demo.stage import Demo, DemoFailed
from server.up import interrupts

QUESTION = "2+3+4="
TOKENS = 230  # of the 256 that the demo's model takes
ATTEMPTS = 20
TIMEOUT_MS = 60_000
CHROMIUM = ("chromium", ".venv/chromium/run")
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


class Photographer:
    """A watcher of the demo: takes the picture once, on a thread of its own."""

    def __init__(self, scene: Scene, out: Path, after_step: int) -> None:
        self._scene, self._out, self._after_step = scene, out, after_step
        self._thread: threading.Thread | None = None
        self.demo: Demo | None = None
        self.problem: Exception | None = None
        self.taken = False

    def __call__(self) -> None:
        """Begins with the reinforcement: a browser may take long to start beside it."""
        if self._thread is None and self._scene.phase == "improve":
            self._thread = threading.Thread(target=self._run, name="photographer", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until the picture is taken. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join(TIMEOUT_MS / 1e3 * 4)
        if self.problem is not None:
            raise self.problem
        if not self.taken:
            raise DemoFailed("picture", "it was not taken")

    def _run(self) -> None:
        assert self.demo is not None
        assert self.demo.server is not None
        try:
            take(self.demo.server.admin_url, self.demo.server.admin_key, self._out, self._far_enough)
            self.taken = True
        except Exception as error:
            self.problem = error

    def _far_enough(self) -> bool:
        return self._scene.step >= self._after_step or self._scene.phase != "improve"


def take(admin_url: str, key: str, out: Path, far_enough: Callable[[], bool]) -> None:
    """Signs in at `admin_url`; once it is `far_enough`, has an answer written across a swap; saves the page as PNG."""
    from playwright.sync_api import sync_playwright

    executable = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 1000}, color_scheme="light", reduced_motion="reduce")
        page.set_default_timeout(TIMEOUT_MS)
        page.route("**/v1/chat/completions", only_what_can_be_seen)
        page.goto(f"{admin_url}/console")
        page.get_by_label("Admin key").fill(key)
        page.keyboard.press("Enter")
        page.locator("#swaps tbody tr td").first.wait_for()
        page.get_by_label("Tokens at most").fill(str(TOKENS))
        page.get_by_label("go on past the end").check()
        while not far_enough():
            time.sleep(0.1)
        ask_across_a_swap(page)
        page.locator("#reward svg path").first.wait_for()
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=out, full_page=True)
        browser.close()


def only_what_can_be_seen(route: Any) -> None:
    """As the demo's client asks: past its end an answer would go on in special tokens, which have no text."""
    body = orjson.loads(route.request.post_data_buffer) | {"logit_bias": SILENT}
    route.continue_(post_data=orjson.dumps(body))


def ask_across_a_swap(page: Any) -> None:
    """Raises RuntimeError when no answer was written by several versions."""
    for _ in range(ATTEMPTS):
        page.get_by_role("button", name="Clear").click()
        page.get_by_label("Your message").fill(QUESTION)
        page.keyboard.press("Enter")
        page.locator("#chat-log[aria-busy=false]").wait_for()
        if page.locator("#chat-log .error").count():
            raise RuntimeError(f"the chat failed: {page.locator('#chat-log .error').first.inner_text()}")
        if page.locator("#chat-log .run").count() > 1:
            return
    raise RuntimeError(f"of {ATTEMPTS} answers none was written by several versions")


def main(argv: list[str] | None = None) -> int:
    """Runs the demo and takes the picture; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.demo.console_shot", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/console.png"), help="where the picture goes")
    parser.add_argument("--dir", type=Path, default=Path("runs/console"), help="where the demo's files go")
    parser.add_argument("--after-step", type=int, default=30, help="of the reinforcement")
    args = parser.parse_args(argv)
    prepare_environment()
    interrupts.install()
    scene = Scene()
    photographer = Photographer(scene, args.out, args.after_step)
    demo = photographer.demo = Demo(args.dir, Recipe(), scene, [photographer])
    try:
        demo.run()
        photographer.wait()
    except Exception as error:
        print(f"console_shot: {error}", file=sys.stderr)
        return 1
    finally:
        interrupts.ignore()
        demo.close()
    print(f"saved {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
