"""A Hugging Face sequence classifier as a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.errors import ConfigError


class Classifier:
    """Prompt and answer, as one text, to a number. Loaded in its worker alone."""

    def __init__(self, path: str, label: int, *, probability: bool, max_tokens: int, batch: int = 1) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self._model = AutoModelForSequenceClassification.from_pretrained(path, local_files_only=True).eval()
        except (OSError, ValueError, KeyError) as error:
            problem = f"cannot load {path} ({error})"
            raise ConfigError("rewards.path", problem, "Name a sequence classification checkpoint") from None
        self._torch, self._label = torch, label
        self._probability, self._max_tokens = probability, max_tokens
        # decoders find the end of a row by the id of padding: without one they take a row at a time
        padding = getattr(self._model.config, "pad_token_id", None)
        self._padding, self.batch = padding or 0, batch if padding is not None else 1
        self.nbytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        labels = self._model.config.num_labels
        if not -labels <= label < labels:
            raise ConfigError("rewards.label", f"{label}, but {path} has {labels} labels", "Name one of them")

    def __call__(self, prompt: str, answer: str, expected: str, extra: dict[str, Any]) -> float:
        return self.many([(prompt, answer, expected, extra)])[0]

    def many(self, asked: Sequence[tuple[str, str, str, dict[str, Any]]]) -> list[float]:
        """The values of several, from one forward pass."""
        torch = self._torch
        with torch.no_grad():
            rows = [torch.tensor(self._tokens(prompt + answer)) for prompt, answer, *_ in asked]
            ids, mask = (
                torch.nn.utils.rnn.pad_sequence(padded, batch_first=True, padding_value=value)
                for padded, value in ((rows, self._padding), ([torch.ones_like(row) for row in rows], 0))
            )
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
            return [self._value(row) for row in logits]

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, truncation=True, max_length=self._max_tokens)["input_ids"]
        return ids

    def _value(self, logits: Any) -> float:
        torch = self._torch
        if len(logits) == 1:
            return float(torch.sigmoid(logits[0]) if self._probability else logits[0])
        chosen = torch.log_softmax(logits, 0)[self._label]
        return float(chosen.exp() if self._probability else chosen - torch.log(-torch.expm1(chosen)))
