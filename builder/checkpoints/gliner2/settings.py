"""Settings of a GLiNER2 checkpoint, from its config.json; what is not implemented is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from transformers import PreTrainedConfig

from builder.checkpoints.gliner.settings import SPANS, encoder_config, refuse_unknown
from builder.checkpoints.json_files import read_json
from builder.checkpoints.untrusted import read_object
from builder.common.errors import CheckpointError

GLINER2 = "GLiNER2"  # the library that saved a checkpoint
FILE = "config.json"
ENCODER_FILE = "encoder_config/config.json"
MODEL_TYPE = "extractor"
COUNTING_LAYERS = ("count_lstm", "count_lstm_v2", "count_lstm_moe")
MAX_WIDTH = 8  # of a span, if the configuration has none


@dataclass(frozen=True)
class Gliner2Settings:
    """Settings that decide what a checkpoint computes. `max_width`: of a span, in words."""

    library: ClassVar[str] = GLINER2
    file: ClassVar[str] = FILE
    encoder_prefix: ClassVar[str] = "encoder."  # of the encoder's weights

    encoder: Mapping[str, Any]
    max_width: int
    counting_layer: Literal["count_lstm", "count_lstm_v2", "count_lstm_moe"]

    def encoder_config(self, source: str) -> PreTrainedConfig:
        """Return the configuration of the encoder. Raises CheckpointError, which names the checkpoint `source`."""
        return encoder_config(self.encoder, source, ENCODER_FILE)


def read_settings(folder: Path, source: str) -> Gliner2Settings | None:
    """Return the settings of the checkpoint in `folder`, named `source`; None if GLiNER2 did not save it.

    Raises CheckpointError for a checkpoint that is not supported.
    """
    if read_object(folder / FILE).get("model_type") != MODEL_TYPE:
        return None
    values = read_json(folder / FILE)
    head = values.get("span_head") or {}
    if not isinstance(head, dict):
        raise CheckpointError(f"{source} has span_head {str(head)[:100]!r} in {FILE}; expected a mapping")
    named = {"architecture": values.get("architecture") or "span", "span_mode": head.get("span_mode", SPANS)}
    named["token_pooling"] = values.get("token_pooling", "first")
    named["counting_layer"] = values.get("counting_layer") or COUNTING_LAYERS[0]
    known = {"architecture": ("span",), "span_mode": (SPANS,), "token_pooling": ("first",)}
    for name, value in named.items():
        refuse_unknown(f"{source} (of {GLINER2})", FILE, name, value, known.get(name, COUNTING_LAYERS))
    width = head.get("max_width", values.get("max_width"))
    width = MAX_WIDTH if width is None else width
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise CheckpointError(f"{source} has max_width {str(width)[:100]!r} in {FILE}; expected a number from 1 on")
    if not (folder / ENCODER_FILE).is_file():
        raise CheckpointError(f"{source} has no {ENCODER_FILE}; save it once more with gliner2, which writes the file")
    return Gliner2Settings(read_json(folder / ENCODER_FILE), width, cast(Any, named["counting_layer"]))
