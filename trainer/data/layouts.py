"""The layouts that records commonly have, where they have no prompt or no target under the configuration's keys.

messages, or conversations     a conversation; ShareGPT's {"from", "value"} as well as {"role", "content"}, and
                               LLaMA-Factory's content of parts {"type", "value"}
instruction, input, output     Alpaca's; the input stands below the instruction, as LLaMA-Factory writes it
system, history                beside these two: the system message, and [question, answer] of the turns before
text                           TRL's and LLaMA-Factory's for pre-training: all of it is learned
prompt, completion             TRL's
chosen, rejected               whose common beginning is the prompt, as TRL's `extract_prompt` takes it
reward_model                   verl's: its `ground_truth` is the answer; rewards get `data_source` and `extra_info`, too
"""

from __future__ import annotations

import json
from typing import Any

from trainer.config.datasets import ANSWER, PROMPT, TARGET, FileData

INSTRUCTION, INPUT, OUTPUT, COMPLETION = "instruction", "input", "output", "completion"
PROMPTS = ("messages", "conversations", INSTRUCTION)
SYSTEM, HISTORY, TEXT, LABEL = "system", "history", "text", "label"
MEDIA = ("images", "videos", "audios")
GROUND_TRUTH, OF_VERL = "reward_model.ground_truth", ("data_source", "extra_info")
KEYS = frozenset({*PROMPTS, INPUT, OUTPUT, COMPLETION, SYSTEM, HISTORY, TEXT, LABEL, GROUND_TRUTH, *OF_VERL})
SAID, CALLS = ("user", "assistant"), "function_call"
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", CALLS: "assistant"}  # ShareGPT's names
_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}

Answer = str | list[dict[str, Any]]


def keys(value: dict[str, Any], config: FileData) -> tuple[str, str]:
    """The keys of a record's prompt and of its target. Those that were set by hand are never replaced."""
    prompt, target = config.prompt_key, config.target_key
    if prompt == PROMPT and value.get(prompt) is None:
        prompt = next((name for name in PROMPTS if value.get(name) is not None), prompt)
    if target == TARGET and value.get(target) is None:
        names = (COMPLETION, OUTPUT) if prompt == INSTRUCTION else (COMPLETION,)
        target = next((name for name in names if value.get(name) is not None), target)
    return prompt, target


def of_verl(value: dict[str, Any], config: FileData) -> bool:
    """Whether a record has its answer where verl's data sets have it."""
    found = value.get("reward_model")
    here = isinstance(found, dict) and found.get("ground_truth") is not None
    return here and config.answer_key == ANSWER and value.get(config.answer_key) is None


def instruction(value: dict[str, Any]) -> Any:
    """Alpaca's prompt."""
    text, more = value.get(INSTRUCTION), value.get(INPUT)
    return f"{text}\n{more}" if isinstance(text, str) and isinstance(more, str) and more else text


def before(value: dict[str, Any], messages: list[Any]) -> list[dict[str, Any]]:
    """The messages that stand before those of a record, in columns of their own. Raises ValueError."""
    system, history = value.get(SYSTEM) or "", value.get(HISTORY) or []
    if not isinstance(system, str):
        raise ValueError(f"{SYSTEM!r} is not a text")
    if not (isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history)):
        raise ValueError(f"{HISTORY!r} is not a list of [question, answer]")
    told = any(isinstance(m, dict) and "system" in (m.get("role"), m.get("from")) for m in messages)
    if told and system:
        raise ValueError(f"it has a system message, and {SYSTEM!r} besides: leave one out")
    turns = [{"role": role, "content": text} for turn in history for role, text in zip(SAID, turn, strict=True)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def check(value: dict[str, Any], *, learned: bool) -> None:
    """Raises ValueError for a record in one of these layouts whose texts alone mean something else than the record, or
    whose answer is not to be `learned`."""
    if media := next((name for name in MEDIA if value.get(name)), ""):
        raise ValueError(f"it has {media!r}, and a run reads texts alone")
    if learned and value.get(LABEL) is False:
        raise ValueError(f"its {LABEL!r} is false, and SFT would learn the bad answer")


def message(value: Any) -> Any:
    """A message of ShareGPT, or with LLaMA-Factory's parts, with a role and a content; others as they are. Raises
    ValueError."""
    if not isinstance(value, dict):
        return value
    if "from" in value and "role" not in value:
        said = {name: part for name, part in value.items() if name not in ("from", "value")}
        if value["from"] not in _ROLES:
            raise ValueError(f"a message is from {value['from']!r}: write a role, and tool_calls for calls of tools")
        value = {**said, "role": _ROLES[value["from"]], "content": value.get("value")} | (
            {"content": "", "tool_calls": calls(value.get("value"))} if value["from"] == CALLS else {}
        )
    content = value.get("content")
    if isinstance(content, list) and content and all(isinstance(part, dict) and "value" in part for part in content):
        return _of_parts(value, content)
    return value


def calls(text: Any) -> list[dict[str, Any]]:
    """Calls of tools, in OpenAI's form, out of {"name", "arguments"} as JSON in a text, or a list of these."""
    try:
        found = json.loads(text)
        found = found if isinstance(found, list) else [found]
        return [{"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in found]
    except (ValueError, TypeError, KeyError):
        raise ValueError('a call of a tool is not {"name": ..., "arguments": {...}} as JSON in a text') from None


def _of_parts(value: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Of LLaMA-Factory's message its texts, thoughts and calls."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in parts:
        if part.get("type") not in texts or not isinstance(part["value"], str):
            raise ValueError(f"a message has a part of type {part.get('type')!r}, and a run reads {', '.join(texts)}")
        texts[part["type"]].append(part["value"])
    said = {name: part for name, part in value.items() if name != "loss_weight"}
    said |= {"content": "".join(texts["text"]), "weight": value.get("loss_weight")}
    if texts["reasoning"]:
        said["reasoning_content"] = "".join(texts["reasoning"])
    if texts["tool_call"]:
        said["tool_calls"] = [call for text in texts["tool_call"] for call in calls(text)]
    return said


def parted(chosen: Answer, rejected: Answer) -> tuple[Answer, Answer, Answer]:
    """The common beginning of two answers, and the rest of each, which is not empty."""
    place = 0
    for place in range(min(len(chosen), len(rejected))):
        if chosen[place] != rejected[place]:
            place -= bool(place and chosen[place - 1] == " ")  # texts part at the space before a word
            break
    return chosen[:place], chosen[place:], rejected[place:]


def is_answer(value: Answer) -> bool:
    """Whether it is the assistant's alone, without the messages before it."""
    return isinstance(value, str) or value[0]["role"] == "assistant"
