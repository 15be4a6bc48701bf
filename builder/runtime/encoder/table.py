"""Embed texts by a table: a text's vector is the mean of its tokens' rows, without any network.

`table.json` says how; beside it, `table.npy` has a row for each token (float32, float16 or int8) and, for int8,
`table.scales.npy` has the factor of each row (float32). Both are mapped, so that instances share their memory.
Source: sentence-transformers 6.2, sentence_transformer/modules/static_embedding.py; model2vec 0.10, model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import numpy as np

from ..typed_json import document_of, read_as

FILE, ROWS, SCALES = "table.json", "table.npy", "table.scales.npy"
SCHEMA = 1
REBUILD = "Build the model again"


@dataclass(frozen=True)
class TableSettings:
    """Settings of a table. `skipped`: tokens that the mean leaves out; `dimensions`: the first ones, which are kept."""

    normalize: bool
    dimensions: int
    skipped: Sequence[int] = ()


class Table:
    """Table of tokens' vectors, opened from the folder of `file`. Raises ContractError if another version wrote it."""

    def __init__(self, file: Path) -> None:
        self.settings: TableSettings = read_as(TableSettings, document_of(file, SCHEMA, REBUILD), file.name, REBUILD)
        self.rows: np.ndarray = np.load(file.with_name(ROWS), mmap_mode="r")
        scales = file.with_name(SCALES)
        self.scales: Union[np.ndarray, None] = np.load(scales, mmap_mode="r") if scales.is_file() else None

    def embed(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the vectors (texts, dimensions) of padded token ids and their mask, both (texts, longest) int64.

        The vector of a text without tokens is zero.
        """
        counted = (mask != 0) & ~np.isin(ids, self.settings.skipped)
        shares = counted.astype(np.float32) / np.maximum(counted.sum(axis=1, keepdims=True), 1).astype(np.float32)
        if self.scales is not None:
            shares = shares * self.scales[ids]
        rows = np.asarray(self.rows[ids]).astype(np.float32, copy=False)
        vectors = (shares[:, None, :] @ rows)[:, 0]
        if self.settings.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))
        return np.ascontiguousarray(vectors[:, : self.settings.dimensions])
