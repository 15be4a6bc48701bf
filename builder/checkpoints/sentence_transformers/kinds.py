"""Classes of sentence-transformers that save checkpoints, and the chain of modules that each may have."""

from __future__ import annotations

import re
from dataclasses import dataclass

from builder.checkpoints.sentence_transformers.chain import ModuleFolder
from builder.common.errors import CheckpointError

EMBEDDER, CROSS_ENCODER, SPARSE_ENCODER = "SentenceTransformer", "CrossEncoder", "SparseEncoder"
MULTI_VECTOR = "MultiVectorEncoder"


@dataclass(frozen=True)
class Kind:
    """Chain of one class. `head`, `output`: the task of the transformer's head, and the output that is read.

    `features`: what the modules after the transformer read and write. `chain`: regular expression over the modules'
    names, separated by spaces; `described`: the same for an error. `reads_chats`: True if texts may be messages of a
    chat template.
    """

    head: str
    output: str
    chain: str
    described: str
    reads_chats: bool = False
    features: str = "sentence_embedding"


KINDS = {
    EMBEDDER: Kind(
        "feature-extraction",
        "last_hidden_state",
        "Transformer( WeightedLayerPooling)? Pooling( Dense| LayerNorm| Normalize)*",
        "Transformer, perhaps WeightedLayerPooling, Pooling, then perhaps Dense, LayerNorm and Normalize",
    ),
    CROSS_ENCODER: Kind("sequence-classification", "logits", "Transformer", "a Transformer alone", True),
    MULTI_VECTOR: Kind(
        "feature-extraction",
        "last_hidden_state",
        "Transformer( Dense| MultiVectorMask| Normalize)*",
        "Transformer, then perhaps Dense, MultiVectorMask and Normalize",
        features="token_embeddings",
    ),
    SPARSE_ENCODER: Kind("fill-mask", "logits", "(MLM)?Transformer SpladePooling", "MLMTransformer and SpladePooling"),
}
STATIC = Kind(
    "feature-extraction",
    "last_hidden_state",
    "StaticEmbedding( Normalize)*",
    "a StaticEmbedding, then perhaps Normalize",
)
LOGIT_RANKER = Kind("text-generation", "logits", "Transformer LogitScore", "a Transformer and LogitScore", True)


def find_kind(name: str, chain: list[ModuleFolder], source: str) -> Kind:
    """Return the kind called `name`, whose chain is `chain`. Raises CheckpointError, which names `source`."""
    names = [module.name for module in chain]
    kinds = (*KINDS.items(), (EMBEDDER, STATIC), (CROSS_ENCODER, LOGIT_RANKER))
    for known, kind in kinds:
        if known == name and re.fullmatch(kind.chain, " ".join(names)):
            return kind
    described = "; ".join(f"a {known} of {kind.described}" for known, kind in kinds)
    raise CheckpointError(f"{source} is a {name} of {', '.join(names)}; known are {described}")
