"""`serve-small`, `serve-8b`, `serve-fp8`: vLLM engines whose weights are swapped, against fresh stock ones;
`streams-small`, `streams-8b`: a whole server under 16 streams, beside vLLM's own reload.

All weights are random and made here. On CUDA, steps are captured graphs and nothing is compiled, for both sides alike:
starting is quick then, and graphs are what a swap has to get along with.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from loadtest.gpu_day.device import Device
from loadtest.gpu_day.hardware import there
from loadtest.gpu_day.report import Report, Skipped

WORK = Path("runs") / "gpu-day"
TOKENIZED = 512  # words of the tokenizer: prompts are token ids
PROMPTS = [[(7 * i + 3 * j) % 400 + 3 for j in range(20 + 17 * i)] for i in range(4)]
STREAMS, SWAPS = 16, 3
ANSWER = 32
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
KV_GIB = 3
WAIT_S = 300.0
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Model:
    """A transformers configuration class and its sizes, and the sizes where there is no CUDA."""

    config: str
    shape: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)


QWEN = Model(
    "Qwen3Config",
    {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2, "head_dim": 32, "vocab_size": TOKENIZED},
)  # fmt: skip
"""Qwen3-0.6B."""
LLAMA = Model(
    "LlamaConfig",
    {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2, "vocab_size": TOKENIZED},
)  # fmt: skip
"""Llama-3.1-8B."""
MOE = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 4096,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
}  # fmt: skip
"""About 0.1 B; every size a multiple of the blocks of 128."""


# checkpoints ---------------------------------------------------------------------------------------------------------


def checkpoints(model: Model, device: Device, *, small: bool) -> list[Path]:
    """Two, which answer differently; made once in WORK."""
    name = f"{model.config.removesuffix('Config').lower()}{'-tiny' if small else ''}"
    paths = [WORK / f"{name}-{seed}" for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        if not (path / "generation_config.json").exists():  # written last
            _write(path, model.config, {**model.shape, **(model.tiny if small else {})}, seed, device)
    return paths


def _write(path: Path, name: str, shape: dict[str, Any], seed: int, device: Device) -> None:
    """Random weights of the scale that keeps activations in bounds, drawn on the device."""
    import transformers
    from safetensors.torch import save_file

    from loadtest.models.checkpoints import write_tokenizer

    config = getattr(transformers, name)(**shape, eos_token_id=1, bos_token_id=1, pad_token_id=0, dtype="bfloat16")
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(skeleton).__name__]
    generator = torch.Generator(device.torch).manual_seed(seed)
    tensors = {}
    for key, value in skeleton.state_dict().items():
        if config.tie_word_embeddings and key == "lm_head.weight":
            continue
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.bfloat16, device=device.torch)
        drawn = drawn.mul_(0.1).add_(1) if value.ndim == 1 else drawn.mul_(2 * value.shape[-1] ** -0.5)
        tensors[key] = drawn.cpu()
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path, TOKENIZED)
    if device.cuda:
        torch.cuda.empty_cache()  # engines in other processes look for what is free


def _fp8_checkpoints() -> list[Path]:
    """A mixture of experts whose matrices are e4m3 in blocks of 128 x 128."""
    from safetensors.torch import load_file, save_file

    from loadtest.models.kinds import make_kind
    from weightsync.publish.quantize import Quantizer

    paths = [WORK / f"moe-fp8-{seed}" for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        if (path / "config.json").exists() and "quantization_config" in (path / "config.json").read_text():
            continue
        make_kind(path, "moe", seed=seed, scale=2.0, **MOE)
        quantizer = Quantizer("fp8")
        tensors = dict(quantizer.tensors(load_file(path / "model.safetensors").items()))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantizer.config()}))
    return paths


# engines -------------------------------------------------------------------------------------------------------------


def serve_small(report: Report, device: Device, small: bool) -> None:
    _require_vllm()
    _against_fresh_engines(report, device, checkpoints(QWEN, device, small=small))


def serve_8b(report: Report, device: Device, small: bool) -> None:
    _require_vllm()
    _against_fresh_engines(report, device, checkpoints(LLAMA, device, small=small))


def serve_fp8(report: Report, device: Device, small: bool) -> None:
    _require_vllm()
    if not device.cuda or torch.cuda.get_device_capability(device.torch) < FP8_CAPABILITY:
        raise Skipped("fp8 in blocks needs a CUDA device of capability 8.9")
    _against_fresh_engines(report, device, _fp8_checkpoints())


def _require_vllm() -> None:
    if not there("vllm"):
        raise Skipped("vLLM is not installed")


def _options(device: Device) -> dict[str, Any]:
    """Of vLLM's LLM, for both sides."""
    common = {"max_model_len": 1024, "max_num_seqs": STREAMS}
    if not device.cuda:
        return {**common, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    return {**common, "kv_cache_memory_bytes": KV_GIB << 30, "compilation_config": GRAPHS}


def _against_fresh_engines(report: Report, device: Device, models: list[Path]) -> None:
    """One engine that is swapped there and back; after each step it must say what a fresh one says, to the bit."""
    from loadtest.gpu_day import vllm_process

    prompts = [[token % TOKENIZED for token in prompt] for prompt in PROMPTS]
    options = _options(device)
    expected = []
    for index, model in enumerate(models):
        begun = time.monotonic()
        expected.append(vllm_process.stock(model, prompts, options))
        nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        report.say(f"fresh_engine_{index + 1}", seconds=time.monotonic() - begun, weights_gb=nbytes / 1e9)
    report.say("the_two_answer_differently", expected[0] != expected[1])
    sleeps = device.cuda
    asked = {**options, "enable_sleep_mode": True} if sleeps else options
    begun = time.monotonic()
    found = vllm_process.swapped(models, prompts, asked, sleeps=sleeps)
    for step, index in (vllm_process.SWAPPED | (vllm_process.ASLEEP if sleeps else {})).items():
        if step in found["answers"]:
            _compare(report, step.replace(" ", "_"), found["answers"][step], expected[index])
    problem, failed = found["figures"].pop("error", None), found["figures"].pop("failed_flip", None)
    report.say("every_step_was_taken", problem is None, **({"error": problem} if problem else {}))
    report.say("the_failed_flip_raised", failed is not None, raised=failed)
    report.say("figures", seconds=time.monotonic() - begun, **found["figures"])


def _compare(report: Report, step: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
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


# servers -------------------------------------------------------------------------------------------------------------


def streams_small(report: Report, device: Device, small: bool) -> None:
    _require_vllm()
    _under_streams(report, device, checkpoints(QWEN, device, small=small), small, warm_up=3, each_s=9.0)


def streams_8b(report: Report, device: Device, small: bool) -> None:
    _require_vllm()
    _under_streams(
        report, device, checkpoints(LLAMA, device, small=small), small, warm_up=2, each_s=9.0 if small else 25.0
    )


def _arguments(device: Device) -> tuple[str, ...]:
    """Of both servers. Instances on CPUs are eager by themselves, and vLLM's own server is told so here.

    Without a prefix cache the same prompt is computed in the same way each time.
    """
    common = ("--max-model-len", "2048", "--max-num-seqs", str(STREAMS), "--no-enable-prefix-caching")
    if not device.cuda:
        return (*common, "--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager")
    return (
        *common, "--kv-cache-memory-bytes", str(KV_GIB << 30), "--compilation-config", json.dumps(GRAPHS)
    )  # fmt: skip


def _under_streams(
    report: Report, device: Device, models: list[Path], small: bool, *, warm_up: int, each_s: float
) -> None:
    """Gaps between tokens while versions are staged and flipped to; then faults, a rollback, and sleep."""
    from loadtest.swaps import stall as swap_stall
    from server.up import interrupts
    from server.up.config import UpConfig
    from server.up.server import Server

    interrupts.install()  # at the limit of time the server is stopped with all of its processes
    arguments = _arguments(device)
    swaps, streams = (1, 4) if small else (SWAPS if each_s < 20 else 2, STREAMS)
    config = UpConfig(
        model=str(models[0]),
        name=swap_stall.MODEL,
        port=0,
        throwaway=True,
        state_dir=WORK / "state",
        vllm_args=arguments,
    )
    begun = time.monotonic()
    with Server(config) as server:
        report.say("hotswap_is_ready", seconds=time.monotonic() - begun)
        ours = swap_stall.on_hotswap(server, models, streams, swaps, warm_up=warm_up, each_s=each_s)
        report.say("no_stream_is_lost", not any(ours[2].values()), **ours[2])
        _say_gaps(report, "hotswap", ours)
        operated = Operated(server, models)
        operated.kill_a_publisher(report, swaps % 2)  # the last swap was to the other checkpoint
        operated.roll_back(report)
        operated.sleep(report, device)
    stock = swap_stall.on_stock(models, WORK, streams, max(1, swaps - 1), arguments=arguments, each_s=each_s)
    _say_gaps(report, "vllm", stock)
    figures = swap_stall.figures_of(ours, stock)
    wanted = ("stall_ms", "stall_ratio", "commit_ms", "commit_ms_max", "staging_gbps", "stage_ms", "publish_ms",
              "goodput_kept", "goodput_kept_vllm", "kernels")  # fmt: skip
    report.say("stalls", streams=streams, swaps=swaps, **{name: figures[name] for name in wanted})


def _say_gaps(report: Report, name: str, measured: Any) -> None:
    from loadtest.measure.gaps import summary

    gaps, windows, _ = measured
    for kind, chosen in (("quiet", windows.quiet), ("swapping", windows.swapping)):
        found: dict[str, Any] = {f"gap_{key}_ms": value for key, value in summary(gaps.within(chosen)).items()}
        longest = [value * 1e3 for value in gaps.longest(chosen)]
        report.say(f"{name}_{kind}", **found, longest_ms=longest, tokens_per_s=gaps.tokens_per_s(chosen))


class Operated:
    """A running server, and what an operator does to it."""

    def __init__(self, server: Any, models: list[Path]) -> None:
        from server.cli.admin import AdminClient

        self._server, self._models = server, models
        self._admin = AdminClient(server.state_dir)
        self._said: dict[int, list[list[int]]] = {}

    def active(self) -> int:
        return int(self._admin.call("GET", "/admin/weights/active")["version"])

    def said(self) -> list[list[int]]:
        """Its greedy answers, one after the other."""
        with httpx.Client(base_url=self._server.url, timeout=WAIT_S) as client:
            found = []
            for prompt in PROMPTS:
                body = {"prompt_token_ids": [token % TOKENIZED for token in prompt], "max_tokens": ANSWER}
                more = {"temperature": 0, "ignore_eos": True, "stream": False}
                answer = client.post("/generate", json=body | more).raise_for_status().json()
                found.append(answer["choices"][0]["token_ids"])
        return found

    def kill_a_publisher(self, report: Report, checkpoint: int) -> None:
        """Its version is ready, and the instance stages it. The slot outlives the publisher: the swap goes through."""
        from loadtest.swaps import stall as swap_stall
        from loadtest.workload.children import publishing

        before = self.active()
        before_said = self.said()
        with ThreadPoolExecutor(1) as pool:
            with publishing(self._server.store, swap_stall.MODEL, self._models) as publish:
                version = int(publish(checkpoint)["version"])
                swap = pool.submit(self._admin.call, "POST", "/admin/weights/activate", {"version": version})
                phase = self._wait_for_swap(version)
            swap.result(WAIT_S)  # the publisher has been killed by now
        report.say("a_killed_publisher", self.active() == version, before=before, version=version, phase_at_kill=phase)
        report.say("its_version_answers", len(self.said()) == len(PROMPTS), before_differs=self.said() != before_said)

    def _wait_for_swap(self, version: int) -> str:
        """Until the swap to it is open; its phase."""
        deadline = time.monotonic() + WAIT_S
        with self._client() as client:
            while time.monotonic() < deadline:
                swap = client.get("/admin/swap").raise_for_status().json()
                found = swap.get("swap") or swap
                if found and found.get("target") == version:
                    return str(found.get("phase"))
                threading.Event().wait(0.002)
        raise TimeoutError(f"no swap to version {version} was opened within {WAIT_S:g} s; see the gateway's log")

    @contextlib.contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        key = {"authorization": f"Bearer {self._server.admin_key}"}
        with httpx.Client(base_url=self._server.admin_url, headers=key, timeout=WAIT_S) as client:
            yield client

    def roll_back(self, report: Report) -> None:
        """And forward: the answers of both are what they were."""
        there, now = self.active(), self.said()
        begun = time.monotonic()
        self._admin.call("POST", "/admin/weights/rollback", {})
        seconds = time.monotonic() - begun
        back, then = self.active(), self.said()
        self._admin.call("POST", "/admin/weights/activate", {"version": there})
        again = self.said()
        report.say("rollback", back < there, version=back, round_trip_ms=seconds * 1e3, answers_differ=then != now)
        report.say("forward_again", again == now, version=self.active())

    def sleep(self, report: Report, device: Device) -> None:
        """It gives the device's memory back, and wakes with what was active."""
        before, awake = self.said(), device.free_nbytes()
        begun = time.monotonic()
        order = {"level": 2, "drain_s": 5.0, "wait_s": WAIT_S}
        state = self._admin.call("POST", "/admin/instances/instance-0/sleep", order)["state"]
        slept = time.monotonic() - begun
        freed = (device.free_nbytes() - awake) / 1e9
        report.say("asleep", state == "asleep", seconds=slept, **({"freed_gb": freed} if device.cuda else {}))
        begun = time.monotonic()
        state = self._admin.call("POST", "/admin/instances/instance-0/wake", {"wait_s": WAIT_S})["state"]
        report.say("awake", state == "serving", seconds=time.monotonic() - begun)
        report.say("it_wakes_with_the_same_weights", self.said() == before, version=self.active())
