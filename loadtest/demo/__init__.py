"""The demo: a small model gets better at sums while a client talks to it.

recipe.py      the model, the two trainings and the engine's settings
stage.py       the parts of a run as phases: build, serve, fine-tune, improve; what goes wrong is a DemoFailed
client.py      the clients that stream the whole time, and what they measure and check
protocols.py   the two kinds of stream they read
background.py  the thread they run in
swaps.py       every swap, read from the store's records
scene.py       what is known at this moment: written by all of the above, read by the display and the summary
display.py     the scene as a live picture, and the summary at the end
"""

from loadtest.demo.scene import Recipe, Scene
from loadtest.demo.stage import Demo, DemoFailed

__all__ = ["Demo", "DemoFailed", "Recipe", "Scene"]
