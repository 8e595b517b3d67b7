"""Eight kinds of rows that people train on, as chat templates get them: arguments of calls are objects."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers – exactly.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 3, "b": 5}},
}


def says(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


ASKED, ANSWERED = says("user", "What is 3+5?"), says("assistant", "It is 8.")
TOLD = says("tool", "8", tool_call_id="call00001", name="add")
KINDS: dict[str, tuple[list[Message], list[Any] | None]] = {
    "plain": ([ASKED, ANSWERED], None),
    "system": ([says("system", "Be brief."), ASKED, ANSWERED], None),
    "developer": ([says("developer", "Be exact."), ASKED, ANSWERED], None),
    "tools": ([ASKED, says("assistant", "", tool_calls=[CALL]), TOLD, ANSWERED], [TOOL]),
    "reasoning": ([ASKED, says("assistant", "It is 8.", reasoning_content="Count on from 5.")], None),
    "null": ([ASKED, says("assistant", None, tool_calls=[CALL])], [TOOL]),
    "empty": ([ASKED, says("assistant", "")], None),
    "turns": ([ASKED, ANSWERED, says("user", "And 2 more?"), says("assistant", "10.")], None),
}
