"""A taskset for verifiers: sums to be asked of a tool. It runs in verifiers' own environment."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """The sum of two numbers."""
        return str(a + b)


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumsTaskset(vf.Taskset[SumsTask]):
    def load(self) -> Iterator[SumsTask]:
        for a in range(5):
            yield SumsTask(SumsData(prompt=f"{a}+{a}?", system_prompt="Be brief.", answer=str(2 * a)))

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Adder(vf.SharedToolsetConfig())]


__all__ = ["SumsTaskset"]

if __name__ == "__main__":  # verifiers runs the module as the tools' server
    Adder.run()
