"""Chat templates of others: rendered as transformers renders them."""

from __future__ import annotations

import functools

import jinja2
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.world import Row, found, rows
from tests.world.kinds import KINDS
from trainer.data.tokenizer import ChatTemplate

LICENCES = {"Apache-2.0", "Apache 2.0 License"}
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def test_the_table_is_what_the_packages_hold() -> None:
    """After a package changes: `python -m tests.world`, and look at what the other tests say of the new ones."""
    listed = rows()
    assert listed == list(found())
    assert {row.licence for row in listed} <= LICENCES
    assert len(listed) >= 80


@functools.cache
def transformers() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), **TOKENS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_a_template_is_rendered_as_by_transformers_or_refused_by_both(row: Row) -> None:
    template = ChatTemplate(row.text, TOKENS)
    for kind, (messages, tools) in KINDS.items():
        for go_on in (True, False):
            theirs: str | None
            try:
                theirs = transformers().apply_chat_template(
                    messages, tools, chat_template=row.text, add_generation_prompt=go_on, tokenize=False
                )
            except (jinja2.TemplateError, TypeError):
                theirs = None
            try:
                mine = template(messages, tools=tools, go_on=go_on)
            except ValueError:
                mine = None
            assert mine == theirs, kind
