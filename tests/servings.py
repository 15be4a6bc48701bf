"""serving.json of small models for tests without a build."""

from __future__ import annotations

from typing import Any

import numpy as np

from builder.runtime.contract import Arena, Batching, EncoderServing, GenerationServing, LayerShape, Session


def answered(answer: dict[str, np.ndarray] | Exception) -> dict[str, np.ndarray]:
    """Return the tensors of an answer that is not an error."""
    assert isinstance(answer, dict), answer
    return answer


def encoder_serving(**changes: Any) -> EncoderServing:
    """Return the serving.json of a model that embeds texts of up to 32 tokens."""
    fields: dict[str, Any] = {
        "task": "feature_extraction",
        "executor": "bls",
        "engine": "m_model",
        "max_length": 32,
        "truncate": False,
        "inputs": {"input_ids": "ids", "attention_mask": "attention_mask"},
        "outputs": ("features",),
        "pad": {"input_ids": 0},
        "batching": Batching(token_budget=64, max_rows=8, call_cost=4),
        "parameters": {"pooled": True, "size": 2, "prompts": {}, "default_prompt": None},
    }
    return EncoderServing(**{**fields, **changes})


def decoder_serving(**changes: Any) -> GenerationServing:
    """Return the serving.json of a decode loop over a Triton model of another name."""
    fields: dict[str, Any] = {
        "task": "text-generation",
        "executor": "bls",
        "arena": Arena(slots=2, length=64, dtype="float32", layers=(LayerShape(2, 8),)),
        "session": Session(),
        "vocabulary": 50,
        "queue": 8,
        "prefill_tokens": 16,
        "beams": 1,
        "max_tokens": 16,
        "end_ids": (1,),
        "fields": ("text_input",),
        "defaults": {},
    }
    return GenerationServing(**{**fields, **changes})
