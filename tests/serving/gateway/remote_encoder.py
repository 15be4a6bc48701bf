"""A model behind a gateway for sentence-transformers' evaluators: what they call, over HTTP.

docs/guides/clients.md shows this file.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import numpy as np
from sentence_transformers.util import cos_sim, pairwise_cos_sim


class RemoteEncoder:
    """Embeds texts with POST /v1/embeddings at `url`."""

    similarity_fn_name = "cosine"

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.model_card_data = self  # where evaluators report their figures
        self.similarity, self.similarity_pairwise = cos_sim, pairwise_cos_sim

    def set_evaluation_metrics(self, *arguments: Any, **options: Any) -> None:
        """Keep nothing: a served model has no model card."""

    def encode(self, texts: list[str], truncate_dim: int | None = None, **options: Any) -> np.ndarray:
        """Return one vector a text (texts, size)."""
        return np.concatenate([self._embed(texts[i : i + 64], truncate_dim) for i in range(0, len(texts), 64)])

    encode_query = encode_document = encode

    def _embed(self, texts: list[str], size: int | None) -> np.ndarray:
        body = {"model": self.model, "input": texts, **({} if size is None else {"dimensions": size})}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/embeddings", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return np.array([entry["embedding"] for entry in json.load(answer)["data"]], np.float32)
