"""Late interaction: a vector a token, and scores of documents by MaxSim (https://arxiv.org/abs/2004.12832).

The reference is sentence-transformers' MultiVectorEncoder, 6.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers, difference, paired_scores
from builder.checkpoints.late_interaction import text_lengths
from builder.checkpoints.metrics import rank_agreement, rank_correlation, score_ranking
from builder.checkpoints.rankers import Ranker, embedding_ranker, token_vectors
from builder.checkpoints.sentence_transformers.kinds import MULTI_VECTOR
from builder.checkpoints.tasks.base import Answer, EncoderTask, Sample, TaskGraph, cosine
from builder.common.errors import CheckpointError
from builder.common.samples import MORE_TEXTS, TEXTS
from builder.runtime.encoder.maxsim import score

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder

PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}  # the first that a checkpoint has
DOCUMENTS = tuple({"text_input": text, "truncate": True} for text in TEXTS)
QUERIES = tuple({"text_input": text, "input_type": "query", "truncate": True} for text in TEXTS[:6])
RANKED = tuple({"query": TEXTS[i], "documents": list(TEXTS[i + 1 : i + 16]), "truncate": True} for i in range(4))


class MultiVectorGraph(TaskGraph):
    """Vectors of all tokens (batch, sequence, size): the last layer through the library's own modules after it."""

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], after: Sequence[torch.nn.Module]) -> None:
        super().__init__(model, inputs, ("vectors",))
        self.after = torch.nn.ModuleList(after)

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        features = {"token_embeddings": self.model(**tensors).last_hidden_state}
        for module in self.after:
            features = module(features)
        return (features["token_embeddings"],)


class MultiVectorEmbedding(EncoderTask):
    name = "multi-vector-embedding"
    head = "feature-extraction"
    precedence = 4
    metric = "cosine or rank correlation"
    threshold = 0.98
    min_ranking: ClassVar[Mapping[str, float]] = {"rank correlation": 0.97, "recall@10": 0.85}
    labels = ("relevance",)
    samples = (*DOCUMENTS, *QUERIES, *RANKED)
    more_samples = tuple({"text_input": text, "truncate": True} for text in MORE_TEXTS)

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return saved_by == MULTI_VECTOR

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        kinds = ("Dense", "Normalize")
        after = [module for module in _encoder(checkpoint) if type(module).__name__ in kinds]
        return MultiVectorGraph(checkpoint.model, inputs, after)

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        encoder = _encoder(checkpoint)
        if checkpoint.pooling is not None:
            raise CheckpointError("--pooling makes one vector a text; late interaction has one a token: leave it out")
        lengths = {
            kind: min(length or checkpoint.max_length, checkpoint.max_length)
            for kind, length in text_lengths(encoder).items()
        }
        return {
            "size": encoder.get_embedding_dimension() or checkpoint.config.hidden_size,
            "prompts": {kind: _prompt(encoder, names) for kind, names in PROMPTS.items()},
            "lengths": lengths,
            "expansion": _expansion(encoder, checkpoint),
            "skipped": {kind: _skipped(encoder, kind) for kind in PROMPTS},
            "similarity": encoder.similarity_fn_name,
        }

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return the library's vectors of a text, or its similarity of documents to a query."""
        encoder = _encoder(checkpoint)
        if "text_input" in sample:
            encode = encoder.encode_query if sample.get("input_type") == "query" else encoder.encode_document
            vectors = encode([sample["text_input"]], convert_to_numpy=True, show_progress_bar=False)[0]
            return {"vectors": vectors.tolist(), "vector_count": len(vectors)}
        query = encoder.encode_query([sample["query"]], show_progress_bar=False)
        documents = encoder.encode_document(list(sample["documents"]), show_progress_bar=False)
        scores = encoder.similarity(query, documents)[0].tolist()
        return {"score": scores, "order": sorted(range(len(scores)), key=lambda place: -scores[place])}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        """Return the mean cosine of vectors, or Spearman's correlation of scores."""
        if "vectors" in expected:
            (first,), (second,) = token_vectors([expected]), token_vectors([actual])
            return cosine(first, second) if first.shape == second.shape else 0.0
        return rank_correlation(expected["score"], actual["score"])

    def ranking(self, expected: Sequence[Answer], actual: Sequence[Answer]) -> dict[str, float]:
        """Compare how each embedded sample ranks the others by MaxSim."""
        pairs = [(e, a) for e, a in zip(expected, actual, strict=True) if "vectors" in e]
        return rank_agreement(*(_similarities(side) for side in zip(*pairs, strict=True))) if pairs else {}

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        if "score" in expected:
            return {"the score of a document": paired_scores(expected["score"], actual["score"])}
        first, second = (np.asarray(answer["vectors"]) for answer in (expected, actual))
        return {"a number of a vector": PairedNumbers(first, second)} if first.shape == second.shape else {}

    def difference(self, expected: Answer, actual: Answer) -> tuple[float, str]:
        """Compare vectors or scores; the order follows from the scores, and near ties may change places."""
        return difference({name: value for name, value in expected.items() if name != "order"}, actual)

    def ranker(self, checkpoint: Checkpoint) -> Ranker | None:
        encoder = _encoder(checkpoint)
        ranker = embedding_ranker({}, encoder.similarity_fn_name, token_vectors)
        return replace(ranker, query={"input_type": "query"}, document={"input_type": "document"})

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `relevance`, a number for each document."""
        return score_ranking([sample["relevance"] for sample in samples], [answer["score"] for answer in answers])


def _encoder(checkpoint: Checkpoint) -> MultiVectorEncoder:
    if checkpoint.late_interaction is None:
        raise CheckpointError(
            f"{checkpoint.source} was not saved for late interaction: expected a checkpoint of sentence-transformers' "
            "MultiVectorEncoder, of pylate or of Stanford's ColBERT"
        )
    return checkpoint.late_interaction


def _prompt(encoder: MultiVectorEncoder, names: Sequence[str]) -> str:
    name = next((name for name in names if name in encoder.prompts), encoder.default_prompt_name)
    return (encoder.prompts.get(name) if name is not None else None) or ""


def _masks(encoder: MultiVectorEncoder) -> list[Any]:
    """Return the modules that say which tokens have a vector. Raises CheckpointError for a list of tokens to keep."""
    masks: list[Any] = [module for module in encoder if type(module).__name__ == "MultiVectorMask"]
    if any(mask.keep_only_token_ids for mask in masks):
        raise CheckpointError("a MultiVectorMask with keep_only_token_ids, of images, is not supported")
    return masks


def _skipped(encoder: MultiVectorEncoder, kind: str) -> list[int]:
    """Return the tokens without a vector."""
    masks = [mask for mask in _masks(encoder) if kind in mask.skiplist_tasks and mask._skiplist_ids is not None]
    return sorted({token for mask in masks for token in mask._skiplist_ids.tolist()})


def _expansion(encoder: MultiVectorEncoder, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return how short queries are expanded. Raises CheckpointError if they do not fit, or are padded on the left."""
    transformer: Any = encoder[0]
    expansion, tokenizer = transformer.query_expansion, checkpoint.tokenizer
    if expansion is None:
        return None
    if expansion["length"] > checkpoint.max_length:
        raise CheckpointError(
            f"queries of {checkpoint.source} are expanded to {expansion['length']} tokens, more than its longest text, "
            f"{checkpoint.max_length}: use a larger --max-length"
        )
    if tokenizer.padding_side != "right":
        raise CheckpointError(f"{checkpoint.source} expands queries on the left, which is not supported")
    token = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    if expansion["token"] is not None:
        token = tokenizer.convert_tokens_to_ids(expansion["token"])
    scored = expansion["attend"] or bool(_masks(encoder))
    return {"length": expansion["length"], "token": token, "attend": expansion["attend"], "scored": scored}


def _similarities(answers: Sequence[Answer]) -> np.ndarray:
    """Return the MaxSim of each answer's vectors with every other's, (answers, answers)."""
    vectors = [np.asarray(answer["vectors"], np.float32) for answer in answers]
    return np.stack([score(one, vectors) for one in vectors])


TASK = MultiVectorEmbedding()
