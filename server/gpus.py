"""The GPUs that processes here see, by their names in CUDA_VISIBLE_DEVICES, and those that each instance gets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from server.errors import ConfigError
from weightsync.vllm_engine.gpus import Gpus

DEVICES_ENV = "CUDA_VISIBLE_DEVICES"


def devices_of_each(asked: Sequence[int], env: Mapping[str, str], seen: Gpus | None) -> list[dict[str, str]]:
    """Environments that give instances the number of GPUs that each has asked for, one behind the other's.

    `seen`: as for `visible_devices`; where nothing is known CUDA decides. A single instance keeps all of them: vLLM
    takes the first. Raises ConfigError when there are too few, or when one cannot be used as it is asked for.
    """
    devices = visible_devices(env, seen) if sum(asked) else None
    if devices is None:
        return [{} for _ in asked]
    ends = list(itertools.accumulate(asked))
    if ends[-1] > len(devices):
        raise ConfigError(
            f"too few GPUs: needed {ends[-1]} ({' + '.join(map(str, asked))}), visible {len(devices)} "
            f"({', '.join(devices)}). Start fewer instances or make more GPUs visible; one that several are to share "
            f"stands in {DEVICES_ENV} once for each"
        )
    shares = [devices[end - count : end] for count, end in zip(asked, ends, strict=True)]
    for share in shares:
        _check_together(share)
    return [{DEVICES_ENV: ",".join(share)} if share and len(asked) > 1 else {} for share in shares]


def visible_devices(env: Mapping[str, str], seen: Gpus | None) -> list[str] | None:
    """The names of the GPUs that a process has in this environment; None where they are not known.

    `seen`: those of this host; None where NVML cannot be asked. Raises ConfigError where there is none, and for a name
    that no GPU here has: CUDA would leave out that one and all behind it.
    """
    said = env.get(DEVICES_ENV)
    if said is not None:
        names = list(itertools.takewhile(lambda name: name not in ("", "-1"), said.replace(" ", "").split(",")))
    elif seen is not None:
        names = [str(gpu.index) for gpu in seen.devices if not gpu.is_part]
    else:
        return None
    if not names or (seen is not None and not seen.devices):
        why = f" ({seen.why_none})" if seen is not None and seen.why_none else ""
        hidden = f" {DEVICES_ENV}={said} hides them." if said is not None and not names else ""
        raise ConfigError(
            f"no GPU is seen here{why}, and the installed vLLM is built for GPUs.{hidden} Start the container with "
            f"--gpus all, load the NVIDIA driver, or change {DEVICES_ENV}; `hotswap doctor --only gpu` says more"
        )
    if seen is not None and said is not None:
        _check_names(names, said, seen)
    return names


def _check_names(names: Sequence[str], said: str, seen: Gpus) -> None:
    stray = next((n for n in names if seen.named(n) is None and not n.startswith("MIG-GPU-")), None)
    if stray is not None:
        here = ", ".join(gpu.uuid if gpu.is_part else f"{gpu.index} or {gpu.uuid}" for gpu in seen.devices)
        raise ConfigError(
            f"{DEVICES_ENV}={said}: no GPU here is called {stray}; this host has {here}. Name each by its number, or "
            "by the whole of what `nvidia-smi -L` shows"
        )


def _check_together(share: Sequence[str]) -> None:
    """Raises ConfigError for GPUs that one instance cannot have."""
    if len(share) > 1 and any(name.startswith("MIG-") for name in share):
        raise ConfigError(
            f"an instance cannot have {', '.join(share)} together: CUDA shows a process one part of a GPU (MIG). "
            "Give each instance one rank, or whole GPUs"
        )
    if len(set(share)) < len(share):
        raise ConfigError(
            f"an instance would have {', '.join(share)}, and each of its ranks needs a GPU of its own: put other "
            f"names into {DEVICES_ENV}, or another order"
        )


def devices_asked(vllm_args: Sequence[str]) -> int:
    """How many GPUs of this host the ranks of one engine take; 0 where Ray places them."""
    if any(arg.rpartition("=")[2] == "ray" for arg in vllm_args):
        return 0
    ranks = tensor_parallel(vllm_args) * _asked(vllm_args, "-pp", "--pipeline-parallel-size")
    ranks *= _asked(vllm_args, "-pcp", "--prefill-context-parallel-size")
    replicas = _asked(vllm_args, "-dp", "--data-parallel-size")
    replicas = _asked(vllm_args, "-dpl", "--data-parallel-size-local", otherwise=replicas)
    return max(1, ranks * replicas // _asked(vllm_args, "-n", "--nnodes"))


def tensor_parallel(vllm_args: Sequence[str]) -> int:
    """The number of ranks asked of vLLM; 1 if it is not said in a form vLLM would take."""
    return _asked(vllm_args, "-tp", "--tensor-parallel-size")


def _asked(vllm_args: Sequence[str], *names: str, otherwise: int = 1) -> int:
    words = [word for arg in vllm_args for word in arg.split("=", 1)]
    for name, value in itertools.pairwise(words):
        if name.replace("_", "-") in names and value.isdigit() and int(value) > 0:
            otherwise = int(value)  # the last one counts, as for vLLM
    return otherwise
