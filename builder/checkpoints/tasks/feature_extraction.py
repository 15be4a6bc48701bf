"""Features of a text: pooled where the checkpoint or the user says how, one vector per token otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers
from builder.checkpoints.metrics import rank_agreement, score_similarity
from builder.checkpoints.pooling import Pooler, TokenStates
from builder.checkpoints.rankers import Ranker, embedding_ranker
from builder.checkpoints.sentence_transformers.modules import Dense, WeightedLayers
from builder.checkpoints.static_embedding import unknown_token
from builder.checkpoints.tasks.base import Answer, EncoderTask, Sample, TaskGraph, cosine, pipeline_of, probe
from builder.common.errors import CheckpointError
from builder.common.samples import MORE_TEXTS, TEXTS
from builder.runtime.encoder.tasks.feature_extraction import STATES


class FeatureGraph(TaskGraph):
    """Features of `states`, through `pooler` if there is one."""

    def __init__(
        self, model: PreTrainedModel, inputs: Sequence[str], states: TokenStates, pooler: Pooler | None
    ) -> None:
        super().__init__(model, inputs, ("features",))
        self.states, self.pooler = states, pooler

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        features = self.states(self.model, tensors)
        if self.pooler is None:
            return (features,)
        return (self.pooler(features, self.pooler.pooled(tensors["input_ids"], tensors["attention_mask"])),)


class StateGraph(TaskGraph):
    """Vector of each token of `states`, after `layers`: the front pools them."""

    def __init__(
        self, model: PreTrainedModel, inputs: Sequence[str], states: TokenStates, layers: torch.nn.Module
    ) -> None:
        super().__init__(model, inputs, (STATES,))
        self.states, self.layers = states, layers

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (self.layers(self.states(self.model, tensors)),)


class FeatureExtraction(EncoderTask):
    name = "feature-extraction"
    head = "feature-extraction"
    precedence = -1  # transformers knows a few models that generate as models without a head too
    has_late_chunking = True
    takes_adapters = True
    longest = 8192
    metric = "cosine"
    threshold = 0.99
    min_ranking: ClassVar[Mapping[str, float]] = {"rank correlation": 0.97, "recall@10": 0.85}
    labels = ("pair", "similarity")
    samples = tuple({"text_input": text} for text in TEXTS)
    more_samples = tuple({"text_input": text} for text in MORE_TEXTS)

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        pooler, states = self.pooler(checkpoint), _states(checkpoint)
        if pooler is not None and _pools_in_front(checkpoint):
            return StateGraph(checkpoint.model, inputs, states, pooler.linear())
        return FeatureGraph(checkpoint.model, inputs, states, pooler)

    def pooler(self, checkpoint: Checkpoint) -> Pooler | None:
        """Return the user's or else the checkpoint's pooling, with the layers after it; None for one vector per token.

        Raises CheckpointError if those layers take another number of pooled parts.
        """
        sentence = checkpoint.sentence
        if sentence is None:
            return None if checkpoint.pooling is None else Pooler((checkpoint.pooling,))
        own = sentence.pooling.modes if sentence.pooling is not None else ()
        if checkpoint.pooling is not None and sentence.of(Dense) and len(own) > 1:
            raise CheckpointError(
                f"--pooling {checkpoint.pooling}: the Dense of {checkpoint.source} takes "
                f"{' and '.join(own)}, one after the other; leave --pooling out"
            )
        modes = own if checkpoint.pooling is None else (checkpoint.pooling,)
        if not modes:
            return None
        drops_unknown = sentence.table is not None and sentence.table.drops_unknown
        unknown = unknown_token(checkpoint.tokenizer) if drops_unknown else None
        return Pooler(modes, sentence.after, sentence.dimensions, () if unknown is None else (unknown,))

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        sentence = checkpoint.sentence
        pooler = self.pooler(checkpoint)
        with torch.no_grad():
            inputs = probe(checkpoint)
            size = self.graph(checkpoint, tuple(inputs))(*inputs.values())[0].shape[-1]
        own: dict[str, Any] = {}
        if _pools_in_front(checkpoint):
            if pooler is None:
                raise CheckpointError(
                    f"--late-chunking: {checkpoint.source} does not say how its tokens become one embedding (no "
                    "modules.json); say it with --pooling mean, if its authors trained it so"
                )
            size = min(size, pooler.dimensions or size)
            own = {"late_chunking": checkpoint.late_chunking, "include_prompt": _includes_prompt(checkpoint)}
        return {
            **own,
            "pooled": pooler is not None,
            "size": size,
            "normalize": pooler is not None and pooler.normalizes,
            "prompts": sentence.prompts if sentence else {},
            "default_prompt": sentence.default_prompt if sentence else None,
        }

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return the pipeline's features of each token, after sentence-transformers' pooling if there is one."""
        text = prompted(checkpoint, sample)
        features = pipeline_of(checkpoint, "feature-extraction")(text, return_tensors=True)
        pooler = self.pooler(checkpoint)
        if pooler is None:
            return {"embedding": features[0].tolist()}
        inputs, states = checkpoint.tokenizer(text, return_tensors="pt"), _states(checkpoint)
        with torch.no_grad():
            if states.weights is not None:
                features = states(checkpoint.model, inputs)
            mask = pooler.pooled(inputs["input_ids"], torch.ones(features.shape[:2]))
            if not _includes_prompt(checkpoint):
                mask[:, : _prompt_tokens(checkpoint, _prompt(checkpoint, sample))] = 0
            return {"embedding": pooler(features, mask)[0].tolist()}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        if np.shape(expected["embedding"]) != np.shape(actual["embedding"]):
            return 0.0
        return cosine(expected["embedding"], actual["embedding"])

    def ranking(self, expected: Sequence[Answer], actual: Sequence[Answer]) -> dict[str, float]:
        """Compare the cosines of the samples' embeddings; nothing for vectors of tokens."""
        if any(np.ndim(answer["embedding"]) != 1 for answer in (*expected, *actual)):
            return {}
        return rank_agreement(*(_cosines([answer["embedding"] for answer in side]) for side in (expected, actual)))

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        first, second = (np.atleast_2d(answer["embedding"]) for answer in (expected, actual))
        return {"a number of the embedding": PairedNumbers(first, second)} if first.shape == second.shape else {}

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `pair`, the same for two texts; `similarity`, how alike those are, a number."""
        pairs: dict[Any, list[int]] = {}
        for index, sample in enumerate(samples):
            pairs.setdefault(sample["pair"], []).append(index)
        whole = [pair for pair in pairs.values() if len(pair) == 2]
        if len(whole) < 2:
            raise ValueError("two texts with the same `pair`, of at least two pairs")
        cosines = [cosine(answers[a]["embedding"], answers[b]["embedding"]) for a, b in whole]
        return score_similarity([float(samples[a]["similarity"]) for a, _ in whole], cosines)

    def ranker(self, checkpoint: Checkpoint) -> Ranker | None:
        sentence = checkpoint.sentence
        if self.pooler(checkpoint) is None:
            return None
        similarity = (sentence.similarity if sentence else None) or "cosine"
        return embedding_ranker(sentence.prompts if sentence else {}, similarity, dense_vectors)


def dense_vectors(answers: Sequence[Answer]) -> torch.Tensor:
    """Return the embeddings of answers, float32 (answers, size)."""
    return torch.from_numpy(np.stack([np.asarray(answer["embedding"], np.float32) for answer in answers]))


def _cosines(vectors: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the cosine of each vector with every other, (vectors, vectors) float64."""
    stacked = np.asarray(vectors, np.float64)
    unit = stacked / np.maximum(np.linalg.norm(stacked, axis=1, keepdims=True), 1e-12)
    return unit @ unit.T


def prompted(checkpoint: Checkpoint, sample: Sample) -> str:
    """Return the text of a sample as sentence-transformers hands it to the tokenizer."""
    return _prompt(checkpoint, sample) + str(sample["text_input"])


def _prompt(checkpoint: Checkpoint, sample: Sample) -> str:
    sentence = checkpoint.sentence
    if "prompt" in sample or sentence is None:
        return str(sample.get("prompt", ""))
    name = sample.get("prompt_name", sentence.default_prompt)
    return sentence.prompts[name] if name else ""


def _includes_prompt(checkpoint: Checkpoint) -> bool:
    """Return False if the checkpoint pools without the tokens of a prompt."""
    pooling = None if checkpoint.sentence is None else checkpoint.sentence.pooling
    return pooling is None or pooling.include_prompt


def _pools_in_front(checkpoint: Checkpoint) -> bool:
    return checkpoint.late_chunking or not _includes_prompt(checkpoint)


def _states(checkpoint: Checkpoint) -> TokenStates:
    """Return the tokens' vectors that are pooled. Raises CheckpointError for weights that do not fit."""
    weighted = [] if checkpoint.sentence is None else checkpoint.sentence.of(WeightedLayers)
    return TokenStates(weighted[0] if weighted else None, checkpoint.model)


def _prompt_tokens(checkpoint: Checkpoint, prompt: str) -> int:
    """Return how many tokens of a row are its prompt's, special tokens before it included.

    As sentence-transformers counts them: in the prompt alone, without a special token at its end
    (base/modules/transformer.py, 6.2).
    """
    tokens = checkpoint.tokenizer(prompt)["input_ids"] if prompt else []
    return len(tokens) - int(bool(tokens) and tokens[-1] in checkpoint.tokenizer.all_special_ids)


TASK = FeatureExtraction()
