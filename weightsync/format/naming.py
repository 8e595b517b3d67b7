"""Advice on tensors that have other names than the served model's: wrappers and savers change them."""

from __future__ import annotations

from collections.abc import Collection

PEFT = "base_model.model."
WRAPPERS = frozenset({"module", "_orig_mod"})  # DistributedDataParallel or DeepSpeed; torch.compile
INNER = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})  # around any module


def advice(got: Collection[str], served: Collection[str]) -> str:
    """How to publish tensors under the served model's names, if those of `got` have something before or between that
    the `served` ones lack, or lack what those begin with; else ""."""
    strange = sorted(name for name in got if name not in served)
    if not strange:
        return ""
    bare = [".".join(word for word in name.split(".") if word not in INNER) for name in strange]
    lacking = [name.removesuffix(bare[0]) for name in served if name.endswith(f".{bare[0]}")]
    for prefix in lacking:
        if all(prefix + name in served and prefix + name not in got for name in bare):
            return (
                f"the served model calls it {prefix + bare[0]!r}: publish all of the model, not only its "
                f"{prefix.rstrip('.')!r}, or put {prefix!r} before the names"
            )
    words = bare[0].split(".")
    for count in range(len(words)):
        prefix = "".join(f"{word}." for word in words[:count])
        inside = [name.removeprefix(prefix) for name in bare if name.startswith(prefix)]
        if len(inside) == len(bare) and all(name in served and name not in got for name in inside):
            return f"the served model calls it {inside[0]!r}: {_unwrapped(strange, inside)}"
    if any(name.startswith(PEFT) for name in strange):
        return (
            "it is PEFT's name: publish what `merge_and_unload()` returns, or the adapter alone as the part lora/NAME "
            "(`weightsync.Adapter.from_peft(model)`, `hotswap weights push DIR --part lora/NAME`)"
        )
    return ""


def _unwrapped(strange: list[str], inside: list[str]) -> str:
    before = strange[0].removesuffix(inside[0])
    words = before.rstrip(".").split(".")
    wraps = WRAPPERS.issuperset(words)
    if strange == [before + name for name in inside] and (wraps or INNER.isdisjoint(words)):
        there = f"publish `model.{'.'.join(words)}`, or " if wraps else ""
        return f"{there}pass strip={before!r} (`hotswap weights push --strip {before}`)"
    return "publish what torch's `get_model_state_dict` returns, which has no names of torch.compile and FSDP"
