"""Stand-ins for models of the retrieval stack: late interaction, and all outputs of BGE-M3's kind in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from builder.runtime.encoder.task import TRUNCATE
from builder.runtime.fields import Field
from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.tensors import Output
from tests.serving.gateway.fake_triton import ENCODED, MODELS, SIZE, FakeTriton, _outputs

VECTORS = (
    Field("vectors", "TYPE_FP32", (-1, SIZE)),
    Field("offsets", "TYPE_INT32", (-1, 2)),
    Field("vector_count", "TYPE_INT32"),
)
SPARSE = (Field("indices", "TYPE_INT32", (-1,)), Field("values", "TYPE_FP32", (-1,)))
OPTIONAL = (Field("text_input", "TYPE_STRING", optional=True), Field("input_type", "TYPE_STRING", optional=True))
RANKED = (Field("query", "TYPE_STRING", optional=True), Field("documents", "TYPE_STRING", (-1,), optional=True))
SCORES = (Field("score", "TYPE_FP32", (-1,)), Field("order", "TYPE_INT32", (-1,)))
EXTRA: dict[str, tuple[str, Sequence[Field], Sequence[Field], dict[str, str]]] = {
    "late": (
        "late-interaction",
        (*OPTIONAL, *RANKED, TRUNCATE),
        (*VECTORS, *SCORES, *ENCODED),
        {"max_input_length": "64"},
    ),
    "hybrid": (
        "hybrid-embedding",
        (Field("text_input", "TYPE_STRING"), TRUNCATE),
        (Field("embedding", "TYPE_FP32", (SIZE,)), *SPARSE, *VECTORS, *ENCODED),
        {},
    ),
}
ENTITIES = '[{"label": "person", "start": 0, "end": 12, "text": "Ada Lovelace", "score": 0.9}]'
EXTRACTION: tuple[str, Sequence[Field], Sequence[Field], dict[str, str]] = (
    "entity-extraction",
    (Field("text_input", "TYPE_STRING"), Field("labels", "TYPE_STRING", (-1,))),
    (Field("entities", "TYPE_STRING"), *ENCODED),
    {},
)
FILLED = {"entities": ENTITIES, "classifications": "{}", "relations": "[]", "structures": '{"work": []}'}
FILLING: tuple[str, Sequence[Field], Sequence[Field], dict[str, str]] = (
    "information-extraction",
    (
        Field("text_input", "TYPE_STRING"),
        Field("labels", "TYPE_STRING", (-1,), optional=True),
        Field("schema", "TYPE_STRING", optional=True),
    ),
    (*(Field(name, "TYPE_STRING") for name in FILLED), *ENCODED),
    {},
)


class RetrievalTriton(FakeTriton):
    """Answers a vector for each letter, of a document one more; rows are padded to the longest."""

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> dict[str, Output]:
        if request.model_name not in (*EXTRA, "extracts", "fills"):
            return await super().infer(request, metadata)
        values = self._read(request, metadata)
        if "documents" in values:
            scores = np.array(
                [[text.count("x") / len(text) for text in row] for row in values["documents"]], np.float32
            )
            return _outputs(score=scores, order=np.argsort(-scores).astype(np.int32))
        texts = [row[0] for row in values["text_input"]]
        if request.model_name == "extracts":
            return _outputs(entities=np.array([[ENTITIES]] * len(texts), np.object_))
        if request.model_name == "fills":
            return _outputs(**{name: np.array([[one]] * len(texts), np.object_) for name, one in FILLED.items()})
        return _outputs(**self._vectors(texts), **(self._sparse(texts) if request.model_name == "hybrid" else {}))

    def _vectors(self, texts: list[str]) -> dict[str, Any]:
        vectors = np.zeros((len(texts), max(map(len, texts)), SIZE), np.float32)
        offsets = np.zeros((*vectors.shape[:2], 2), np.int32)
        for row, text in enumerate(texts):
            for at, letter in enumerate(text):
                angle = ord(letter) / 9
                vectors[row, at], offsets[row, at] = [np.cos(angle), np.sin(angle), 0, 0], [at, at + 1]
        return {"vectors": vectors, "offsets": offsets, "vector_count": np.array([[len(t)] for t in texts], np.int32)}

    def _sparse(self, texts: list[str]) -> dict[str, Any]:
        longest = max(map(len, texts))
        indices = np.array([[*map(ord, text), *[-1] * (longest - len(text))] for text in texts], np.int32)
        return {
            "indices": indices,
            "values": np.where(indices < 0, 0, 0.5).astype(np.float32),
            "embedding": np.array([[len(text), 3, 0, 1] for text in texts], np.float32),
        }


def add_models(monkeypatch: pytest.MonkeyPatch) -> RetrievalTriton:
    """Add the models to those of FakeTriton, and return a server of them."""
    for name, model in {**EXTRA, "extracts": EXTRACTION, "fills": FILLING}.items():
        monkeypatch.setitem(MODELS, name, model)
    return RetrievalTriton()
