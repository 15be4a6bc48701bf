"""Labels named in the request, by a model trained on textual entailment."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tasks.base import Answer, Sample, head_size, pipeline_of
from builder.checkpoints.tasks.text_classification import TextClassification
from builder.common.errors import CheckpointError
from builder.common.samples import MORE_TEXTS, TEXTS

LABELS = ["business", "travel", "science", "food"]


class ZeroShotClassification(TextClassification):
    name = "zero-shot-classification"
    has_class_scores = False
    takes_adapters = False
    samples = tuple({"text_input": text, "candidate_labels": LABELS} for text in TEXTS[:24])
    more_samples = tuple({"text_input": text, "candidate_labels": LABELS} for text in MORE_TEXTS)

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return False  # no configuration tells: an entailment model also classifies pairs

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        labels = super().parameters(checkpoint)["labels"]
        entailment = [index for index, label in enumerate(labels) if label.lower().startswith("entail")]
        if len(entailment) != 1 or head_size(checkpoint) < 2:
            raise CheckpointError(
                f"zero-shot classification needs a model with a label 'entailment'; this one has {', '.join(labels)}"
            )
        return {"labels": labels, "entailment": entailment[0]}

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        options = {key: sample[key] for key in ("hypothesis_template", "multi_label") if key in sample}
        pipeline = pipeline_of(checkpoint, "zero-shot-classification")
        answer = pipeline(sample["text_input"], candidate_labels=list(sample["candidate_labels"]), **options)
        return {"label": answer["labels"], "score": answer["scores"]}


TASK = ZeroShotClassification()
