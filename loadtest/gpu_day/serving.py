"""`serve-small`, `serve-8b`, `serve-fp8`: vLLM engines whose weights are swapped, against fresh stock ones.

On CUDA, steps are captured graphs and nothing is compiled, for both sides alike: starting is quick then, and graphs are
what a swap has to get along with. Small models' engines run at once, stock and swapped: answers do not depend on what
runs beside. Their times do: read those of `serve-8b`, whose engines run one behind the other.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import psutil
import torch

from loadtest.gpu_day import vllm_process
from loadtest.gpu_day.device import Device
from loadtest.gpu_day.hardware import there
from loadtest.gpu_day.models import LLAMA, PROMPTS, QWEN, TOKENIZED, checkpoints, fp8_checkpoints, nbytes_of
from loadtest.gpu_day.report import Report, Skipped

STREAMS = 16
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
FP8_CAPABILITY = (8, 9)
SHARE = 0.15  # of the device, asked to be free by each engine of several
WAYS = ("copy", "remap")
SLEEPING_COPIES = 8  # of the weights, in host memory: checkpoints, slots, vLLM's copy, versions that move there


def serve_small(report: Report, device: Device, small: bool) -> None:
    require_vllm()
    _against_fresh_engines(report, device, checkpoints(QWEN, device, report.work, small=small), at_once=True)


def serve_8b(report: Report, device: Device, small: bool) -> None:
    require_vllm()
    _against_fresh_engines(report, device, checkpoints(LLAMA, device, report.work, small=small), at_once=False)


def serve_fp8(report: Report, device: Device, small: bool) -> None:
    require_vllm()
    if not device.cuda or torch.cuda.get_device_capability(device.torch) < FP8_CAPABILITY:
        raise Skipped("fp8 in blocks needs a CUDA device of capability 8.9")
    _against_fresh_engines(report, device, fp8_checkpoints(report.work), at_once=True)


def require_vllm() -> None:
    """Raises Skipped."""
    if not there("vllm"):
        raise Skipped("vLLM is not installed")


def _options(device: Device, *, at_once: bool) -> dict[str, Any]:
    """Of vLLM's LLM, for all engines."""
    common = {"max_model_len": 1024, "max_num_seqs": STREAMS}
    if not device.cuda:
        return {**common, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    share = {"gpu_memory_utilization": SHARE} if at_once else {}
    return {**common, **share, "kv_cache_memory_bytes": 1 << 30, "compilation_config": GRAPHS}


def sleeps_here(report: Report, device: Device, nbytes: int) -> bool:
    """Whether the host has the memory that a sleep in place takes; says so where it has not."""
    room = psutil.virtual_memory().available
    if device.cuda and room < SLEEPING_COPIES * nbytes:
        report.say("no_sleep", needs_gb=SLEEPING_COPIES * nbytes / 1e9, available_gb=room / 1e9)
    return device.cuda and room >= SLEEPING_COPIES * nbytes


def _against_fresh_engines(report: Report, device: Device, models: list[Path], *, at_once: bool) -> None:
    """Engines that are swapped there and back, by copies and by remapping; after each step they must say what a fresh
    one says, to the bit. The one that copies sleeps, too."""
    prompts = [[token % TOKENIZED for token in prompt] for prompt in PROMPTS]
    options = _options(device, at_once=at_once)
    sleeps = sleeps_here(report, device, nbytes_of(models[0]))
    asked: dict[str, Any] = {"prompts": prompts, "options": options}
    with ThreadPoolExecutor(len(models) + len(WAYS) if at_once else 1) as pool:

        def ask(name: str, way: str = "copy", **question: Any) -> Future[dict[str, Any]]:
            environment = {"HOTSWAP_DEVICE_FLIP": way}
            return pool.submit(
                vllm_process.ask, asked | question, report.logs / f"{report.phase}-{name}.log", environment
            )

        stock = [ask(f"stock-{i}", kind="stock", model=str(model)) for i, model in enumerate(models)]
        swapped = dict[str, Future[dict[str, Any]]]()
        for way in WAYS if device.cuda else WAYS[:1]:
            slept = {"options": {**options, "enable_sleep_mode": True}} if sleeps and way == "copy" else {}
            question = {"kind": "swapped", "models": [str(model) for model in models], "sleeps": bool(slept), **slept}
            swapped[way] = ask(f"swapped-{way}", way, **question)
        found = [future.result() for future in stock]
        expected = [each["answers"] for each in found]
        seconds = [each["seconds"] for each in found]
        report.say("fresh_engines", seconds=seconds, weights_gb=nbytes_of(models[0]) / 1e9, at_once=at_once)
        report.say("the_two_answer_differently", expected[0] != expected[1])
        ways = {future: way for way, future in swapped.items()}
        for future in as_completed(ways):
            _judge(report, ways[future], future, expected, sleeps=sleeps and ways[future] == "copy")


def _judge(
    report: Report, way: str, future: Future[dict[str, Any]], expected: list[vllm_process.Answers], *, sleeps: bool
) -> None:
    try:
        found = future.result()
    except vllm_process.EngineFailed as error:
        report.say(f"{way}_ran", False, error=str(error))
        return
    figures = found["figures"]
    for step, index in (vllm_process.SWAPPED | (vllm_process.ASLEEP if sleeps else {})).items():
        if step in found["answers"]:
            _compare(report, f"{way}_{step.replace(' ', '_')}", found["answers"][step], expected[index])
    problem, failed = figures.pop("error", None), figures.pop("failed_flip", None)
    report.say(f"{way}_every_step_was_taken", problem is None, **({"error": problem} if problem else {}))
    report.say(f"{way}_failed_flip_raised", failed is not None, raised=failed)
    if "vacated_gb" in figures:
        report.say(f"{way}_buffers_were_given_back", figures["vacated_gb"] > 0, vacated_gb=figures["vacated_gb"])
    report.say(f"{way}_figures", seconds=found["seconds"], **figures)


def _compare(report: Report, step: str, ours: vllm_process.Answers, theirs: vllm_process.Answers) -> None:
    """Tokens and log-probabilities, of answers and of prompts."""
    same = [a["tokens"] == b["tokens"] for a, b in zip(ours, theirs, strict=True)]
    distance = max(
        abs(x[1] - y[1])
        for a, b in zip(ours, theirs, strict=True)
        for kind in ("logprobs", "prompt_logprobs")
        for place, other in zip(a[kind], b[kind], strict=True)
        for x, y in zip(place, other, strict=False)
    )
    report.say(step, ours == theirs, same_tokens=sum(same), prompts=len(same), largest_logprob_distance=distance)
