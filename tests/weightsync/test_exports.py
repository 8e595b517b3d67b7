"""The package's promises to its users: its names, and that importing them costs neither torch nor vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weightsync
from weightsync import errors

CLASSES = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.WeightSyncError)]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Publicher"):
        weightsync.Publicher  # noqa: B018


def test_every_name_is_there_and_importing_them_all_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, weightsync, weightsync.push\n"
        "[getattr(weightsync, name) for name in weightsync.__all__]\n"
        "heavy = {'torch', 'vllm', 'transformers', 'safetensors'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [e.code for e in CLASSES]
    assert len(set(codes)) == len(codes) > 20


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert {e.__name__ for e in CLASSES} <= set((errors.__doc__ or "").split())


def test_an_error_travels_as_json() -> None:
    error = errors.shape_mismatch("model.norm.weight", (4,), (5,))
    assert error.to_json() == {"code": "shape_mismatch", "message": str(error), "tensor": "model.norm.weight"}
    assert "[5]" in str(error)
    assert "[4]" in str(error)
