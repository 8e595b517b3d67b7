"""Where a policy acts: tasks of several turns, with tools or without.

base.py     what an environment is, for those who write one
tools.py    the environment of tools: functions, sandboxed Python, MCP servers
games.py    small games, as examples
worker.py   the process that environments run in
verifiers_worker.py  the same for environments of the package verifiers, under their own Python
host.py     the trainer's side: processes and episodes
"""

from trainer.environments.base import Environment, Message, Observation, Task
from trainer.environments.host import EnvironmentHost, Episode, messages_of

__all__ = ["Environment", "EnvironmentHost", "Episode", "Message", "Observation", "Task", "messages_of"]
