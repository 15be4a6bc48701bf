"""Labels of a text or of a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers, paired_scores
from builder.checkpoints.metrics import score_labels
from builder.checkpoints.tasks.base import Answer, EncoderTask, Sample, head_size, label_list, pipeline_of
from builder.common.samples import MORE_TEXTS, TEXTS


class TextClassification(EncoderTask):
    name = "text-classification"
    head = "text-classification"
    precedence = 1
    unused_weights = ()
    per_token = False
    metric = "label agreement"
    threshold = 0.99
    has_class_scores = True
    takes_adapters = True
    labels = ("label",)
    samples = tuple({"text_input": text} for text in TEXTS)
    more_samples = tuple({"text_input": text} for text in MORE_TEXTS)

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        config = checkpoint.config
        if config.problem_type == "regression":
            function = "none"
        elif config.problem_type == "multi_label_classification" or config.num_labels == 1:
            function = "sigmoid"
        else:
            function = "softmax"
        return {"labels": label_list(config, head_size(checkpoint)), "function": function}

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        text: Any = sample["text_input"]
        if "text_pair" in sample:
            text = {"text": text, "text_pair": sample["text_pair"]}
        options = {key: sample[key] for key in ("function_to_apply",) if key in sample}
        answers = pipeline_of(checkpoint, "text-classification")(text, top_k=int(sample.get("top_k", 1)), **options)
        return {"label": [a["label"] for a in answers], "score": [a["score"] for a in answers]}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        return float(expected["label"][0] == actual["label"][0])

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        first, second = (dict(zip(answer["label"], answer["score"], strict=True)) for answer in (expected, actual))
        both = [label for label in first if label in second]
        return {f"the score of {label}": paired_scores([first[label]], [second[label]]) for label in both}

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `label`, the right label."""
        return score_labels([str(sample["label"]) for sample in samples], [str(a["label"][0]) for a in answers])


TASK = TextClassification()
