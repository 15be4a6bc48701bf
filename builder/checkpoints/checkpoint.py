"""Checkpoint: the files that a build reads, and the model that they load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from builder.checkpoints.gliner.settings import GlinerSettings
from builder.checkpoints.gliner2.settings import Gliner2Settings
from builder.checkpoints.grids import StoredWeights
from builder.checkpoints.sentence_transformers import SentenceModules

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder

    from builder.checkpoints.tasks import Task  # which imports this module


@dataclass(frozen=True)
class CheckpointFiles:
    """Checkpoint on disk. `weights_sha256` identifies the weights; None where a commit of the Hub does.

    `gliner`: its settings, if GLiNER or GLiNER2 saved it; `config` is its encoder's then. `card`: its origin, from
    its card. `headless`: the head has random weights, which adapters replace.
    """

    source: str
    revision: str | None
    folder: Path
    weights: tuple[Path, ...]
    weights_sha256: str | None
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast
    task: Task
    sentence: SentenceModules | None
    gliner: GlinerSettings | Gliner2Settings | None
    card: Mapping[str, list[str]]
    headless: bool = field(default=False, kw_only=True)

    @property
    def family(self) -> str:
        """Family of builder/building/families that serves it: its task's, unless it has a table and no network."""
        return "static" if self.sentence is not None and self.sentence.table is not None else self.task.family

    def identity(self) -> dict[str, Any]:
        """Return the checkpoint's identity for build.json."""
        return {
            "source": self.source,
            "revision": self.revision,
            "model_type": self.config.model_type,
            "weights_sha256": self.weights_sha256,
        }


@dataclass(frozen=True)
class Checkpoint(CheckpointFiles):
    """Checkpoint with its model, in fp32: all that exporting it needs.

    `pooling`: the user's pooling of token vectors, if it replaces the checkpoint's own. `late_chunking`: requests may
    ask for it. `grids`: those of its matrices, if they are stored in 4 or 8 bits. `late_interaction`:
    sentence-transformers' encoder over `model`, if it saved one. `head_size`: outputs of the head of an adapter that
    replaces the checkpoint's.
    """

    model: PreTrainedModel
    max_length: int
    pooling: str | None = None
    late_chunking: bool = False
    grids: StoredWeights | None = None
    late_interaction: MultiVectorEncoder | None = None
    head_size: int | None = None
