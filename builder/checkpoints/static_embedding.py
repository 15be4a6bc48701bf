"""Static embeddings: a table with a vector for each token, whose mean is the embedding of a text; no network.

Reads the StaticEmbedding module of sentence-transformers 6.2 and checkpoints of model2vec 0.10.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

from builder.checkpoints.fetch import refuse_damaged
from builder.checkpoints.untrusted import read_object
from builder.common.errors import CheckpointError

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
OF_LIBRARY, OF_MODEL2VEC = "embedding.weight", "embeddings"  # the table's name in the file of either
MAPPING, FACTORS = "mapping", "weights"  # of model2vec: the row of each token, and the factor of its vector


class StaticConfig(PreTrainedConfig):  # type: ignore[misc]
    """Configuration of a table: as many rows as tokens, and the numbers of a row."""

    model_type = "static-embedding"

    def __init__(self, vocab_size: int = 1, hidden_size: int = 1, **options: Any) -> None:
        super().__init__(**{"pad_token_id": None, **options})
        self.vocab_size, self.hidden_size = vocab_size, hidden_size


class StaticModel(PreTrainedModel):  # type: ignore[misc]
    """Table as a model: the state of a token is its row, whatever the tokens beside it."""

    config_class = StaticConfig

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.table = torch.nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.table(input_ids.long()))  # a text without tokens has no integers


def is_model2vec(root: Path) -> bool:
    """Return True if model2vec saved the checkpoint in `root`, perhaps with a modules.json beside its own files."""
    return bool(read_object(root / "config.json").get("model_type") == "model2vec")


def read_static_config(folder: Path, model: str) -> StaticConfig:
    """Return the configuration of the table in `folder`, from its shapes.

    Raises CheckpointError, which names `model`.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{model} has no {WEIGHTS}, which alone says how large its table of vectors is")
    refuse_damaged([path], model)
    with safe_open(path, framework="np") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  # not a mapping
    table = shapes.get(OF_LIBRARY, shapes.get(OF_MODEL2VEC))
    if table is None or len(table) != 2:
        raise CheckpointError(
            f"{WEIGHTS} of {model} has {', '.join(sorted(shapes)) or 'nothing'}; expected {OF_LIBRARY} or "
            f"{OF_MODEL2VEC}, of two axes"
        )
    rows = shapes.get(MAPPING, table[:1])
    if MAPPING in shapes and (len(rows) != 1 or not rows[0]):
        raise CheckpointError(
            f"{MAPPING} of {model} has the shape {rows}; expected one axis, with a row for each token"
        )
    return StaticConfig(vocab_size=int(rows[0]), hidden_size=int(table[1]))


def load_static(config: StaticConfig, folder: Path) -> StaticModel:
    """Return the table in `folder` in fp32, with a row for each token.

    A mapping and factors of model2vec are folded into the rows. Raises CheckpointError.
    """
    tensors = load_file(folder / WEIGHTS)
    rows = tensors.get(OF_LIBRARY)
    if rows is None:
        rows = _folded(tensors, folder.name)
    rows = rows.to(torch.float32)
    if not torch.isfinite(rows).all():
        raise CheckpointError(f"the table in {WEIGHTS} of {folder.name} has numbers that are not finite")
    with torch.device("meta"):
        model = StaticModel(config)
    model.table.weight = torch.nn.Parameter(rows.contiguous(), requires_grad=False)
    return model.eval()


def _folded(tensors: dict[str, torch.Tensor], source: str) -> torch.Tensor:
    """Return the rows of a model2vec table, (tokens, size): those of its mapping, times its factors."""
    rows, mapping, factors = tensors[OF_MODEL2VEC], tensors.get(MAPPING), tensors.get(FACTORS)
    if mapping is not None:
        if mapping.is_floating_point() or mapping.is_complex():
            raise CheckpointError(f"{MAPPING} of {source} is {mapping.dtype}; expected integers, the row of each token")
        mapping = mapping.long()
        if not 0 <= int(mapping.min()) <= int(mapping.max()) < len(rows):
            raise CheckpointError(f"{MAPPING} of {source} does not name rows of its {OF_MODEL2VEC} ({len(rows)})")
        rows = rows[mapping]
    if factors is None:
        return rows
    if factors.shape != rows.shape[:1]:
        raise CheckpointError(f"{source} has {tuple(factors.shape)} {FACTORS} for a table of {len(rows)} tokens")
    return rows.to(torch.float32) * factors.to(torch.float32)[:, None]


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in `folder`, without the special tokens around a text: a mean has no use for them.

    A length at which its file cuts texts is its limit.
    """
    document = json.loads((folder / TOKENIZER).read_text("utf-8"))
    cut, document["post_processor"] = document.get("truncation") or {}, None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(document)))
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    if cut:
        tokenizer.model_max_length = cut["max_length"]
        tokenizer.truncation_side = str(cut.get("direction", "right")).lower()
    return tokenizer


def unknown_token(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the id that stands for what the vocabulary lacks; None if there is none."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if "unk_token" in model:
        token = model["unk_token"]
        return None if token is None else tokenizer.backend_tokenizer.token_to_id(token)
    return model.get("unk_id")
