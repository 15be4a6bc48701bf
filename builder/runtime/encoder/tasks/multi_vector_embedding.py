"""Embed texts by late interaction: a vector a token, and the scores of documents for a query by those vectors.

Reads texts as sentence-transformers' MultiVectorEncoder does (base/modules/transformer.py, preprocess, and
multi_vector_encoder/modules/multi_vector_mask.py, 6.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from tokenizers import Encoding

from ...fields import Field, InputError, Tensors, choice, count, one_each, strings
from .. import task
from ..maxsim import score
from ..text import Truncation
from ..token_pooling import pool
from ..token_vectors import NOWHERE, padded, text_offsets, vector_outputs

QUERY, DOCUMENT = "query", "document"


@dataclass(frozen=True)
class Tokens:
    """Tokens of one text, as the pipeline reads those of an Encoding. `scored`: True for those with a vector."""

    ids: Sequence[int]
    type_ids: Sequence[int]
    attention_mask: Sequence[int]
    offsets: np.ndarray  # (tokens, 2), in the text without its prompt
    scored: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


class Task(task.Task):
    offsets = True

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING", optional=True),
            Field("input_type", "TYPE_STRING", optional=True),
            Field("query", "TYPE_STRING", optional=True),
            Field("documents", "TYPE_STRING", (-1,), optional=True),
            Field("pool_factor", "TYPE_INT32", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            *vector_outputs(parameters["size"]),
            Field("score", "TYPE_FP32", (-1,)),
            Field("order", "TYPE_INT32", (-1,)),
        )

    def read(self, tensors: Tensors) -> task.EncodingJob:
        """Read texts to embed, or queries with documents to score; a request asks for one of them."""
        names = [name for name in ("text_input", QUERY, "documents") if name in tensors]
        if names not in (["text_input"], [QUERY, "documents"]):
            raise InputError(
                f"the request has {' and '.join(names) or 'no text'}; send text_input to get vectors, or query and "
                "documents to get scores"
            )
        if names != ["text_input"] and "input_type" in tensors:
            raise InputError("input_type is for text_input; leave it out where query and documents are sent")
        kinds, texts = self._embedded(tensors) if names == ["text_input"] else self._ranked(tensors)
        factor = count(tensors, "pool_factor", 1)
        prompted = [self.parameters["prompts"][kind] + text for kind, text in zip(kinds, texts)]
        options = {"kinds": kinds, "factor": factor, "batch": len(tensors[names[0]]), "ranks": QUERY in names}
        return task.EncodingJob(list(prompted), options, self.wants_truncation(tensors))

    def _embedded(self, tensors: Tensors) -> tuple[list[str], list[str]]:
        kind, texts = choice(tensors, "input_type", DOCUMENT, (QUERY, DOCUMENT)), one_each(tensors, "text_input")
        return [kind] * len(texts), texts

    def _ranked(self, tensors: Tensors) -> tuple[list[str], list[str]]:
        """Return the kinds and the texts: each query and, after it, its documents."""
        queries, documents = one_each(tensors, QUERY), strings(tensors, "documents")
        if len(queries) != len(documents):
            raise InputError(f"documents has {len(documents)} rows and query {len(queries)}; send one row a query")
        texts = [text for query, row in zip(queries, documents) for text in (query, *row)]
        return [QUERY, *[DOCUMENT] * len(documents[0])] * len(queries), texts

    def rows(self, job: task.EncodingJob, encodings: Sequence[Encoding]) -> list[task.Row]:
        return [self._row(job, source, encoding) for source, encoding in enumerate(encodings)]

    def _row(self, job: task.EncodingJob, source: int, encoding: Encoding) -> task.Row:
        kind = job.options["kinds"][source]
        limit, is_long = self.parameters["lengths"][kind], len(encoding) > self.parameters["lengths"][kind]
        if is_long and not job.truncate:
            raise InputError(
                f"text {source} has {len(encoding)} tokens; a {kind} of this model has at most {limit}: {self.too_long}"
            )
        if is_long:
            encoding = self.text([job.texts[source]], Truncation(limit, self.strategy))[0]
        return task.Row(cast(Encoding, self._tokens(encoding, kind)), source, truncated=is_long)

    def _tokens(self, encoding: Encoding, kind: str) -> Tokens:
        """Return the tokens that the engine reads: a query's are followed by the tokens that expand it, if any do."""
        expansion = self.parameters["expansion"] if kind == QUERY else None
        more = max(0, expansion["length"] - len(encoding)) if expansion else 0
        ids = [*encoding.ids, *[expansion["token"]] * more] if expansion else encoding.ids
        attended = int(expansion["attend"]) if expansion else 0
        scored = ~np.isin(ids, self.parameters["skipped"][kind])
        scored[len(encoding) :] &= bool(expansion and expansion["scored"])
        return Tokens(
            ids,
            [*encoding.type_ids, *[0] * more],
            [*encoding.attention_mask, *[attended] * more],
            np.pad(
                text_offsets(encoding, len(self.parameters["prompts"][kind])), ((0, more), (0, 0)), constant_values=-1
            ),
            scored,
        )

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        """Return vectors padded with zeros, with offsets of -1 there; or scores, and the places of the best first."""
        embedded = [self._embedding(job, row, output["vectors"]) for row, output in zip(rows, outputs)]
        if not job.options["ranks"]:
            return padded(embedded, self.parameters["size"])
        size, mean = len(rows) // job.options["batch"], self.parameters["similarity"] == "meanmaxsim"
        blocks = [[vectors for vectors, _ in embedded[at : at + size]] for at in range(0, len(rows), size)]
        scores = np.stack([score(block[0], block[1:], mean) for block in blocks])
        return {"score": scores, "order": np.argsort(-scores, axis=-1, kind="stable").astype(np.int32)}

    def _embedding(self, job: task.EncodingJob, row: task.Row, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of one text (n, size), and the offsets of each (n, 2)."""
        tokens = cast(Tokens, row.encoding)
        kept, offsets = vectors[: len(tokens)][tokens.scored], tokens.offsets[tokens.scored]
        factor = job.options["factor"] if job.options["kinds"][row.source] == DOCUMENT else 1
        return _pooled(kept, offsets, factor) if factor > 1 else (kept, offsets)


def _pooled(vectors: np.ndarray, offsets: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of groups of vectors, at length 1, without an offset where a group has several tokens."""
    means, groups = pool(vectors, factor)
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    return means, np.stack([offsets[group[0]] if len(group) == 1 else [NOWHERE, NOWHERE] for group in groups])
