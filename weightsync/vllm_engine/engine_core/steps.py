"""One step for all data-parallel ranks that share experts.

These ranks compute each other's experts in every forward pass, so a commit has all of them flip between the same two.
vLLM counts their steps together. At the first step of a wave, and at every `dp_sync_interval`-th, the ranks tell each
other whether any has work left. At these steps they also exchange the version that each was asked to commit, and once
all were asked for the same one, each flips there, before its next forward pass. Until then generation goes on: the
commit waits, and no request does.

A rank without requests begins to step when it is asked, with empty batches, as vLLM's pause has it do. A rank that was
asked steps on until the others were, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

NOTHING = -1  # no version


@dataclass(frozen=True)
class Asked:
    """A commit that waits for the step at which all ranks were asked for `version`; `flip` is this rank's part."""

    version: int
    flip: Callable[[], dict[str, Any]]
    done: Future[dict[str, Any]] = field(default_factory=Future)


def are_common(core: Any) -> bool:
    """Whether the steps of this engine core are those of other ranks, too."""
    return hasattr(core, "dp_group")


def at_common_step(core: Any, version: int, flip: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
    """The answer of `flip`, which is called at the step at which all ranks were asked for `version`. Raises
    RuntimeError while another commit waits."""
    if (waits := asked(core)) is not None:
        raise RuntimeError(f"the commit of version {waits.version} waits for the other ranks")
    core._hotswap_asked = Asked(version, flip)
    core.engines_running = True
    return core._hotswap_asked.done  # type: ignore[no-any-return]


def asked(core: Any) -> Asked | None:
    """The commit that waits."""
    found: Asked | None = getattr(core, "_hotswap_asked", None)
    return found


def agreed(core: Any, version: int) -> bool:
    """Whether all ranks name `version`; each rank asks at the same step."""
    import torch
    from torch.distributed import ReduceOp, all_reduce

    least = torch.tensor([version, -version], dtype=torch.int64)
    all_reduce(least, op=ReduceOp.MIN, group=core.dp_group)
    return version != NOTHING and least.tolist() == [version, -version]


def meeting(original: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
    """`DPEngineCoreProc._has_global_unfinished_reqs`, which counts a step and exchanges at some."""

    @functools.wraps(original)
    def has_global_unfinished_reqs(self: Any, local_unfinished: bool) -> bool:
        if (step := self.step_counter + 1) == 1 or step % self.dp_sync_interval == 0:
            _meet(self)
        return original(self, local_unfinished or asked(self) is not None)

    return has_global_unfinished_reqs


def _meet(core: Any) -> None:
    waits = asked(core)
    if not agreed(core, NOTHING if waits is None else waits.version) or waits is None:
        return
    core._hotswap_asked = None
    try:
        answer = waits.flip()
    except Exception as error:
        waits.done.set_exception(error)
    else:
        waits.done.set_result(answer)
