"""Fill a schema from one text alone, as the gliner2 package does: the reference of served answers.

Source: gliner2 2.1.0, processor.py (SchemaTransformer._format_input_with_mapping).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.gliner2.layers import Gliner2Head, Places
from builder.runtime.encoder.filling import fill
from builder.runtime.encoder.schemas import Part, lay_out
from builder.runtime.encoder.words import words_with_marks


def fill_schema(
    checkpoint: Checkpoint, head: Gliner2Head, text: str, schema: Sequence[Part], threshold: float
) -> dict[str, Any]:
    """Return entities, classifications, relations and structures of `text`. Each word is tokenised alone."""
    tokenizer, layout = checkpoint.tokenizer, lay_out(schema)
    sentence = text if text.endswith((".", "!", "?")) else f"{text}."
    words = words_with_marks(sentence)
    ids, places = list[int](), list[int]()
    for word in (*layout.words, *layout.values, *(sentence[start:end].lower() for start, end in words)):
        places.append(len(ids))
        ids += tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))
    markers = (layout.labels, layout.fields, layout.choices, layout.prompts)
    rows = [places[len(layout.words) :], *([places[word] for word in part] or [0] for part in markers)]
    with torch.no_grad():
        row = torch.tensor([ids])
        features = checkpoint.model(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state
        scores = head(features, Places(*(torch.tensor([part]) for part in rows)))
    logits = {name: values[0].numpy() for name, values in scores._asdict().items()}
    return fill(schema, layout, text, words, logits, threshold)
