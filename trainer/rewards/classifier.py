"""A Hugging Face sequence classifier as a reward model."""

from __future__ import annotations

from typing import Any

from trainer.errors import ConfigError


class Classifier:
    """Prompt and answer, as one text, to a number. Loaded in its worker alone."""

    def __init__(self, path: str, label: int, *, probability: bool, max_tokens: int) -> None:
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
        self.nbytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        labels = self._model.config.num_labels
        if not -labels <= label < labels:
            raise ConfigError("rewards.label", f"{label}, but {path} has {labels} labels", "Name one of them")

    def __call__(self, prompt: str, answer: str, _expected: str, _extra: dict[str, Any]) -> float:
        torch = self._torch
        with torch.no_grad():
            inputs = self._tokenizer(prompt + answer, return_tensors="pt", truncation=True, max_length=self._max_tokens)
            logits = (
                self._model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[0].float()
            )
        if len(logits) == 1:
            return float(torch.sigmoid(logits[0]) if self._probability else logits[0])
        chosen = torch.log_softmax(logits, 0)[self._label]
        return float(chosen.exp() if self._probability else chosen - torch.log(-torch.expm1(chosen)))
