"""Sentence embeddings to compare: feature extraction that must know how to pool."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.sentence_transformers.kinds import EMBEDDER
from builder.checkpoints.tasks.feature_extraction import FeatureExtraction
from builder.common.errors import CheckpointError


class SentenceSimilarity(FeatureExtraction):
    name = "sentence-similarity"
    precedence = 2

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return saved_by == EMBEDDER

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        if self.pooler(checkpoint) is None:
            raise CheckpointError(
                f"{checkpoint.source} does not say how its tokens become one embedding (no modules.json); "
                "say it with --pooling cls or mean, as its authors trained it"
            )
        return super().parameters(checkpoint)


TASK = SentenceSimilarity()
