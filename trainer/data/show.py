"""Records as a run would take them, as text in which the tokens that are learned are marked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trainer.batch import Sequence
from trainer.data.tokenizer import Tokenizer


def shown(sequence: Sequence, tokenizer: Tokenizer) -> str:
    """Its tokens as text, special ones too, the learned between [[ and ]], below a line that counts them."""
    mask = sequence.mask or (1,) * len(sequence.continuation)
    marks = [*((int(sequence.train_on_prompt),) * len(sequence.prompt)), *mask]
    tokens = zip(sequence.prompt + sequence.continuation, marks, strict=True)
    return f"{len(marks)} tokens, {int(sum(marks))} learned\n" + "".join(_spans(tokens, tokenizer))


def _spans(tokens: Iterator[tuple[int, float]], tokenizer: Tokenizer) -> Iterator[str]:
    for learned, span in itertools.groupby(tokens, key=lambda token: bool(token[1])):
        text = tokenizer.decode([token for token, _ in span], special=True)
        yield f"[[{text}]]" if learned else text
