"""The likeliest tokens for each mask of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers, paired_scores
from builder.checkpoints.metrics import score_labels
from builder.checkpoints.tasks.base import Answer, EncoderTask, Sample, TaskGraph, pipeline_of
from builder.checkpoints.tokenizer import cleans_up
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS


class MaskGraph(TaskGraph):
    """Logits (batch, masks, vocabulary) at `positions` (batch, masks) alone.

    The head runs on the features of those positions only: they are picked as the base model returns, so the
    graph neither computes nor moves the vocabulary's logits for any other token.
    """

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        positions = tensors.pop("positions")

        def pick(module: Any, arguments: Any, output: Any) -> Any:
            index = positions.unsqueeze(-1).expand(-1, -1, output[0].shape[-1])
            output["last_hidden_state"] = output[0].gather(1, index)
            return output

        with self.model.base_model.register_forward_hook(pick):
            return (self.model(**tensors).logits,)


class FillMask(EncoderTask):
    name = "fill-mask"
    head = "fill-mask"
    precedence = 1
    per_token = False
    extra_inputs = ("positions",)
    metric = "top token agreement"
    threshold = 0.99
    labels = ("target",)

    @property
    def samples(self) -> tuple[Sample, ...]:  # type: ignore[override]
        """Each text with one word masked; `{mask}` stands for the checkpoint's own mask token."""
        masked = []
        for i, text in enumerate(TEXTS):
            words = text.split(" ")
            words[i % len(words)] = "{mask}"
            masked.append({"text_input": " ".join(words)})
        return tuple(masked)

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        return MaskGraph(checkpoint.model, inputs, self.graph_outputs)

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        if checkpoint.tokenizer.mask_token is None:
            raise CheckpointError(f"the tokenizer of {checkpoint.source} has no mask token; fill-mask needs one")
        tokenizer = checkpoint.tokenizer
        return {
            "mask": tokenizer.mask_token,
            "mask_id": tokenizer.mask_token_id,
            "pad_id": tokenizer.pad_token_id,
            "clean_up": cleans_up(tokenizer),
        }

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        options = {key: sample[key] for key in ("targets", "top_k") if key in sample}
        predictions = pipeline_of(checkpoint, "fill-mask")(sample["text_input"], **options)
        return {"predictions": json.dumps(predictions, ensure_ascii=False)}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        masks = _masks(expected, actual)
        return float(sum(x[0]["token"] == y[0]["token"] for x, y in masks) / len(masks))

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        masks = [[{p["token"]: p["score"] for p in side} for side in mask] for mask in _masks(expected, actual)]
        both = [(first[token], second[token]) for first, second in masks for token in first if token in second]
        return {"the score of a token": paired_scores([first for first, _ in both], [second for _, second in both])}

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `target`, the word under the mask."""
        best = [json.loads(answer["predictions"])[0]["token_str"].strip() for answer in answers]
        return score_labels([str(sample["target"]) for sample in samples], best)


def _masks(expected: Answer, actual: Answer) -> list[tuple[Any, Any]]:
    """Return the predictions of two answers for each mask."""
    first, second = (json.loads(answer["predictions"]) for answer in (expected, actual))
    return [(first, second)] if isinstance(first[0], dict) else list(zip(first, second, strict=True))


TASK = FillMask()
