"""The demos: a model gets better at sums while clients talk to it.

recipe.py   what a demo builds, trains and asks, and the quick demo's own
real.py     the same for a real model
stage.py    the parts of a run as phases: build, serve, fine-tune, improve; what goes wrong is a DemoFailed
client.py   the clients that stream the whole time, and what they measure and check
scene.py    what is known at this moment: written by all of the above, read by the display and the summary
display.py  the scene as a live picture, and the summary at the end
figures.py  a run's figures, and the chart of them
"""

from loadtest.demo.real import RealRecipe
from loadtest.demo.recipe import Recipe
from loadtest.demo.scene import Scene
from loadtest.demo.stage import Demo, DemoFailed

__all__ = ["Demo", "DemoFailed", "RealRecipe", "Recipe", "Scene"]
