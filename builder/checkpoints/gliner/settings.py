"""Settings of a GLiNER checkpoint, from its gliner_config.json; what is not implemented is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import AutoConfig, PreTrainedConfig

from builder.checkpoints.json_files import read_json
from builder.common.errors import CheckpointError, first_line

GLINER = "GLiNER"  # the library that saved a checkpoint
FILE = "gliner_config.json"
SPANS, TOKENS = "markerV0", "token_level"  # span_mode: how entities are scored
MODEL_TYPES = (None, "gliner", "gliner_uni_encoder_span", "gliner_uni_encoder_token")
POOLING = ("first", "last")
NOT_IMPLEMENTED = (  # settings that must not be set
    "labels_encoder",
    "labels_decoder",
    "relations_layer",
    "post_fusion_schema",
    "fuse_layers",
    "span_encoder_config",
    "represent_spans",
    "precomputed_prompts_mode",
)
CONVERT = (
    "save it once with the gliner package, where you trust its pickle:\n"
    "python -c \"from gliner import GLiNER; GLiNER.from_pretrained('{model}').save_pretrained('gliner-model', "
    'safe_serialization=True)"\nand build gliner-model'
)


@dataclass(frozen=True)
class GlinerSettings:
    """Settings that decide what a checkpoint computes.

    `max_width`, `max_words`: of a span and of a text, in words. `pooling`: which token stands for its word.
    `embeds_marker`: a label is the vector of the marker before it; of the token after that if not.
    """

    library: ClassVar[str] = GLINER
    file: ClassVar[str] = FILE
    encoder_prefix: ClassVar[str] = "token_rep_layer.bert_layer.model."  # of the encoder's weights

    encoder: Mapping[str, Any]
    hidden_size: int
    span_mode: Literal["markerV0", "token_level"]
    max_width: int
    max_words: int
    recurrent_layers: int
    pooling: Literal["first", "last"]
    label_marker: str
    separator: str
    label_marker_id: int
    embeds_marker: bool

    def encoder_config(self, source: str) -> PreTrainedConfig:
        """Return the configuration of the encoder. Raises CheckpointError, which names the checkpoint `source`."""
        return encoder_config(self.encoder, source, FILE)


def encoder_config(values: Mapping[str, Any], source: str, file: str) -> PreTrainedConfig:
    """Return the configuration of an encoder with `values` of `file`. Raises CheckpointError, which names `source`."""
    values = {"model_type": "deberta-v2", **values}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    except Exception as error:  # transformers raises errors of any type for a broken configuration
        raise CheckpointError(
            f"{source} has no encoder_config that transformers knows in {file}: {first_line(error)}"
        ) from error
    config.architectures = None  # those of its pretraining
    return config


def read_settings(folder: Path, source: str, weights: bool) -> GlinerSettings | None:
    """Return the settings of the checkpoint in `folder`, named `source`; None if GLiNER did not save it.

    Without `weights`, those may be missing. Raises CheckpointError for a checkpoint that is not supported.
    """
    if not (folder / FILE).is_file():
        return None
    values = read_json(folder / FILE)
    _refuse_incomplete(folder, source, values, weights)
    _refuse_settings(source, values)
    recurrent = _number(source, values, "num_rnn_layers", 1, least=0)
    return GlinerSettings(
        encoder=values["encoder_config"],
        hidden_size=_number(source, values, "hidden_size", 512),
        span_mode=values.get("span_mode", SPANS),
        max_width=_number(source, values, "max_width", 12),
        max_words=_number(source, values, "max_len", 384),
        recurrent_layers=recurrent if values.get("has_rnn", True) else 0,
        pooling=values.get("subtoken_pooling", POOLING[0]),
        label_marker=str(values.get("ent_token", "<<ENT>>")),
        separator=str(values.get("sep_token", "<<SEP>>")),
        label_marker_id=_number(source, values, "class_token_index", -1, least=-1),
        embeds_marker=bool(values.get("embed_ent_token", True)),
    )


def _refuse_incomplete(folder: Path, source: str, values: Mapping[str, Any], weights: bool) -> None:
    """Raise CheckpointError unless the folder has all that a build reads: older ones name the encoder instead."""
    missing = [
        what
        for what, is_there in (
            ("weights as model.safetensors", not weights or any(folder.glob("*.safetensors"))),
            (f"encoder_config in {FILE}", isinstance(values.get("encoder_config"), dict)),
            ("tokenizer", (folder / "tokenizer_config.json").is_file()),
        )
        if not is_there
    ]
    if missing:
        raise CheckpointError(f"{source} has no {' and no '.join(missing)}; {CONVERT.format(model=source)}")


def _refuse_settings(source: str, values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a setting with which the library computes more than is implemented."""
    chosen: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("model_type", None, MODEL_TYPES),
        ("span_mode", SPANS, (SPANS, TOKENS)),
        ("words_splitter_type", "whitespace", ("whitespace",)),
        ("subtoken_pooling", POOLING[0], POOLING),
        *((name, None, (None, False, "")) for name in NOT_IMPLEMENTED),
    )
    for name, default, known in chosen:
        refuse_unknown(source, FILE, name, values.get(name, default), known)


def refuse_unknown(source: str, file: str, name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raise CheckpointError unless the setting `name` of `file` has a value that is `known`."""
    if value not in known:
        expected = " or ".join(repr(one) for one in known if one is not None)
        raise CheckpointError(
            f"{source} has {name} {str(value)[:100]!r} in {file}, which is not implemented; expected {expected}"
        )


def _number(source: str, values: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**7:
        raise CheckpointError(f"{source} has {name} {str(value)[:100]!r} in {FILE}; expected a number from {least} on")
    return value
