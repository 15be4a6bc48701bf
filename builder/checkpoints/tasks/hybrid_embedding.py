"""Dense, sparse and multi-vector embeddings by one call, of checkpoints with the heads of BGE-M3.

Sources: https://arxiv.org/abs/2402.03216; FlagEmbedding, finetune/embedder/encoder_only/m3/modeling.py, 1.4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint, CheckpointFiles
from builder.checkpoints.distances import PairedNumbers, difference
from builder.checkpoints.fetch import refuse_damaged
from builder.checkpoints.pooling import Pooler
from builder.checkpoints.rankers import EmbeddingRanker, Ranker, embedding_ranker, token_vectors
from builder.checkpoints.tasks.base import Answer, Sample, TaskGraph
from builder.checkpoints.tasks.feature_extraction import FeatureExtraction, dense_vectors, prompted
from builder.checkpoints.tasks.multi_vector_embedding import TASK as MULTI_VECTOR
from builder.checkpoints.tasks.sparse_embedding import TASK as SPARSE
from builder.checkpoints.tasks.sparse_embedding import token_weights
from builder.common.errors import CheckpointError
from builder.common.hashing import digest_of

HEADS = ("sparse_linear", "colbert_linear")  # files in the checkpoint's folder, of one linear layer each
CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "[s.save_file(torch.load(f'{n}.pt', weights_only=True), f'{n}.safetensors') "
    "for n in ('sparse_linear', 'colbert_linear')]\""
)
SUMMED = (0.4, 0.2, 0.4)  # weights of the similarities in a sum of them, as on the model card of BAAI/bge-m3
PARTS = (FeatureExtraction(), SPARSE, MULTI_VECTOR)


class HybridGraph(TaskGraph):
    """Embeddings (batch, size), weights of tokens (batch, sequence), and vectors of tokens (batch, sequence, size')."""

    def __init__(
        self, model: PreTrainedModel, inputs: Sequence[str], pooler: Pooler, heads: Sequence[torch.nn.Linear]
    ) -> None:
        super().__init__(model, inputs, ("features", "weights", "vectors"))
        self.pooler = pooler
        self.sparse, self.multi_vector = heads

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        features = self.model(**tensors).last_hidden_state
        weights = torch.relu(self.sparse(features)).squeeze(-1)
        vectors = torch.nn.functional.normalize(self.multi_vector(features), dim=-1)
        return self.pooler(features, tensors["attention_mask"]), weights, vectors


class HybridEmbedding(FeatureExtraction):
    name = "hybrid-embedding"
    has_late_chunking = False
    takes_adapters = False
    metric = "lowest cosine of the three"

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        """Return False: a checkpoint with these heads is a dense one too, which it stays unless the user says more."""
        return False

    def prepare(self, files: CheckpointFiles) -> CheckpointFiles:
        """Return the checkpoint with the heads in its digest. Raises CheckpointError for one without them."""
        if files.sentence is None or files.sentence.pooling is None:
            raise CheckpointError(f"{files.source} has no modules.json with a Pooling, which makes the dense embedding")
        if not files.sentence.pooling.include_prompt:
            raise CheckpointError(
                f"{files.source} pools without its prompt (include_prompt: false), which {self.name} does not support; "
                "serve its dense embedding alone with --task sentence-similarity"
            )
        if not files.weights:
            return files  # not downloaded, the heads neither
        heads = head_files(files)
        refuse_damaged(heads, files.source)
        digest = digest_of([*files.weights, *heads]) if files.weights_sha256 else None
        return replace(files, weights_sha256=digest)

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        return HybridGraph(checkpoint.model, inputs, self._dense(checkpoint), _heads(checkpoint))

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        own = {
            "pooled": False,  # no dimensions or windows: the other outputs have none
            "skipped": _skipped(checkpoint),
            "vector_size": _heads(checkpoint)[1].out_features,
        }
        return {**super().parameters(checkpoint), **own}

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return the answer to one text alone, without padding."""
        text = prompted(checkpoint, sample)
        encoded = checkpoint.tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0, 1:] - (len(text) - len(str(sample["text_input"])))
        sparse, multi_vector = _heads(checkpoint)
        with torch.no_grad():
            features = checkpoint.model(**encoded).last_hidden_state
            weights = torch.relu(sparse(features))[0, :, 0].tolist()
            vectors = torch.nn.functional.normalize(multi_vector(features[0, 1:]), dim=-1)
            dense = self._dense(checkpoint)(features, encoded["attention_mask"])[0]
        largest: dict[int, float] = {}
        for token, weight in zip(encoded["input_ids"][0].tolist(), weights, strict=True):
            largest[token] = max(largest.get(token, 0.0), weight)
        skipped = _skipped(checkpoint)
        tokens = sorted(token for token, weight in largest.items() if weight > 0 and token not in skipped)
        return {
            "embedding": dense.tolist(),
            "indices": tokens,
            "values": [largest[token] for token in tokens],
            "vectors": vectors.tolist(),
            "offsets": [[max(start, 0), end] if end > 0 else [-1, -1] for start, end in offsets.tolist()],
            "vector_count": len(vectors),
        }

    def agreement(self, expected: Answer, actual: Answer) -> float:
        return min(part.agreement(expected, actual) for part in PARTS)

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        return {kind: pair for part in PARTS for kind, pair in part.numbers(expected, actual).items()}

    def ranking(self, expected: Sequence[Answer], actual: Sequence[Answer]) -> dict[str, float]:
        """Return the lowest of each measure by the three outputs."""
        measured = [part.ranking(expected, actual) for part in PARTS]
        return {name: min(one[name] for one in measured) for name in measured[0]}

    def difference(self, expected: Answer, actual: Answer) -> tuple[float, str]:
        return max(
            SPARSE.difference(expected, actual),
            difference(_unsparse(expected), _unsparse(actual)),
            key=lambda one: one[0],
        )

    def ranker(self, checkpoint: Checkpoint) -> Ranker | None:
        """Return the ranker by the weighted sum of the three similarities."""
        assert checkpoint.sentence is not None  # has the pooling
        dense = embedding_ranker(checkpoint.sentence.prompts, "cosine", dense_vectors)
        sparse = embedding_ranker({}, "dot", partial(token_weights, vocabulary=checkpoint.config.vocab_size))
        three = (dense, sparse, embedding_ranker({}, "meanmaxsim", token_vectors))

        def vectors(answers: Sequence[Answer]) -> list[Any]:
            return [one.vectors(answers) for one in three]

        def similarity(queries: Sequence[Any], documents: Sequence[Any]) -> torch.Tensor:
            scores = (one.similarity(*both) for one, *both in zip(three, queries, documents, strict=True))
            return torch.stack([weight * score for weight, score in zip(SUMMED, scores, strict=True)]).sum(dim=0)

        return EmbeddingRanker(dense.query, dense.document, vectors, similarity)

    def _dense(self, checkpoint: Checkpoint) -> Pooler:
        pooler = self.pooler(checkpoint)
        if checkpoint.pooling is not None or pooler is None:
            raise CheckpointError("--pooling replaces the dense part of a checkpoint of three: leave it out")
        return pooler


def head_files(files: CheckpointFiles) -> list[Path]:
    """Return the files of the heads. Raises CheckpointError if one is missing, or only there as a pickle."""
    assert files.sentence is not None
    found = [files.sentence.root / f"{name}.safetensors" for name in HEADS]
    missing = [file.name for file in found if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{files.source} has no {' and no '.join(missing)}, the heads of hybrid-embedding. If it has them as .pt, "
            f"which can run code when it is loaded, convert them in its folder:\n{CONVERT}"
        )
    return found


def _skipped(checkpoint: Checkpoint) -> list[int]:
    """Return the tokens without a weight."""
    tokenizer = checkpoint.tokenizer
    special = (tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return sorted({token for token in special if token is not None})


def _unsparse(answer: Answer) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("indices", "values")}


def _heads(checkpoint: Checkpoint) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Return the linear layers of weights and of vectors. Raises CheckpointError for tensors that are not theirs."""
    sparse, multi_vector = head_files(checkpoint)
    return _linear(sparse, checkpoint, 1), _linear(multi_vector, checkpoint, None)


def _linear(file: Path, checkpoint: Checkpoint, outputs: int | None) -> torch.nn.Linear:
    tensors, inputs = load_file(file), checkpoint.config.hidden_size
    size = outputs or len(tensors.get("weight", ()))
    linear = torch.nn.Linear(inputs, size, bias="bias" in tensors)
    try:
        linear.load_state_dict(tensors)
    except RuntimeError as error:
        found = {name: list(tensor.shape) for name, tensor in sorted(tensors.items())[:3]}
        raise CheckpointError(
            f"{file.name} of {checkpoint.source} has {found}; expected the weight [{outputs or 'n'}, {inputs}] of a "
            "linear layer, and its bias"
        ) from error
    return linear.eval()


TASK = HybridEmbedding()
