"""The real model of the demo: what the package brings becomes a checkpoint that knows what SmolLM2 knows."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from loadtest.models import smollm as module
from loadtest.models.smollm import ModelPackageMissing, smollm
from tests.lacking import lacking

pytestmark = [pytest.mark.slow, pytest.mark.broad]
TEXT = "The Earth goes around the Sun once a year, and the Moon goes around the Earth about once a month."


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("gguf", module.PACKAGE):
        if importlib.util.find_spec(package) is None:
            lacking(f"no {package}: install requirements/demo-real.txt")
    return smollm(tmp_path_factory.mktemp("cache"))


def test_it_knows_the_capital_of_france_and_english(converted: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    asked = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        answer = model.generate(**asked, do_sample=False, max_new_tokens=4)
        text = tokenizer(TEXT, return_tensors="pt")
        loss = float(model(**text, labels=text["input_ids"]).loss)
    assert "Paris" in tokenizer.decode(answer[0, asked["input_ids"].shape[1] :])
    # A quarter of the tokens' rows in a wrong order, as llama.cpp keeps q and k, brings hundreds.
    assert math.exp(loss) < 20
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_trainer_takes_it(converted: Path) -> None:
    from trainer.data.tokenizer import Tokenizer
    from trainer.megatron.hf_config import load_shape
    from trainer.megatron.hf_files import HfTensors

    shape = load_shape(str(converted))
    HfTensors(str(converted)).check(shape.schema("float32"))
    assert shape.parameters == 134_515_008
    assert Tokenizer(converted).size == shape.vocab


def test_it_is_converted_once(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    assert smollm(converted.parent) == converted
    assert [path.name for path in converted.parent.iterdir()] == [converted.name]


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    with pytest.raises(ModelPackageMissing, match=r"pip install -r requirements/demo-real.txt"):
        smollm(tmp_path)
    assert list(tmp_path.iterdir()) == []
