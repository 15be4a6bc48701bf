"""Gemma 4 for text, images and audio in one: as Gemma 4."""

from __future__ import annotations

from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedTextModel

from builder.graphs.export.architectures.gemma4_text import keep_all_tokens

REPLACED = (Gemma4UnifiedTextModel, "_maybe_slice_kv_shared_inputs", keep_all_tokens)
