"""Find the data files of a folder as the Hub or `datasets` lays them out, with the part and the split of each.

Known are the layouts of BEIR (corpus.jsonl, queries.jsonl, qrels/test.tsv), of the repositories mteb/* and
zeta-alpha-ai/Nano* (a folder of parquet files for each part), of NanoBEIR-en (a split for each of its sets), and of
Dataset.save_to_disk and DatasetDict.save_to_disk. The part and the split of a file are words of its path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builder.common.data_files import INFO, read_rows
from builder.common.errors import SpecError
from builder.common.hashing import digest_of

SUFFIXES = re.compile(r"\.(jsonl(\.gz)?|parquet|arrow|tsv)$")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
ROWS, CORPUS, QUERIES, QRELS, CANDIDATES = "rows", "corpus", "queries", "qrels", "candidates"
PARTS = {"corpus": CORPUS, "queries": QUERIES, "qrels": QRELS, "top_ranked": CANDIDATES, "bm25": CANDIDATES}
WITHOUT_MEANING = ("data", "default")  # words of paths that name neither a part nor a split
DEFAULT_SPLIT = "test"
CHOOSE = "choose one with --split"  # advice to the user


@dataclass(frozen=True)
class DataFile:
    """File of one part of the data. `split` is "" if its path names none."""

    path: Path
    part: str
    split: str


@dataclass(frozen=True)
class DataFolder:
    """Data files of a folder."""

    root: Path
    files: tuple[DataFile, ...]

    def select(self, split: str | None, advice: str = CHOOSE) -> Mapping[str, list[dict[str, Any]]]:
        """Return the rows of each part: those of a split or, if the part does not have it, all of them.

        `split`: None for the only one, or else `test`. Raises SpecError, with `advice`, for a split that is not there.
        """
        chosen = self._choose(split, advice)
        parts = {file.part for file in self.files if file.split == chosen}
        rows: dict[str, list[dict[str, Any]]] = {}
        for file in self.files:
            if file.split in (chosen, "") or file.part not in parts:
                rows.setdefault(file.part, []).extend(read_rows(file.path))
        return rows

    def _choose(self, requested: str | None, advice: str) -> str:
        """Return the split to evaluate: one of the relevance of documents, or else of the rows."""
        kind = QRELS if any(file.part == QRELS for file in self.files) else ROWS
        splits = sorted({file.split for file in self.files if file.part == kind})
        if requested is None and len(splits) == 1:
            return splits[0]
        if (requested or DEFAULT_SPLIT) not in splits:
            found = " or ".join(filter(None, splits)) or "none"
            raise SpecError(f"{self.root} has no split {requested or DEFAULT_SPLIT!r}: {advice}: {found}")
        return requested or DEFAULT_SPLIT


def read_parts(data: Path, split: str | None = None, advice: str = CHOOSE) -> Mapping[str, list[dict[str, Any]]]:
    """Return the rows of a file or of a folder by part, those of `split`.

    Raises SpecError; `advice`: what to do about a split that is not there.
    """
    if data.is_dir():
        return data_folder(data).select(split, advice)
    if split is not None:
        raise SpecError(f"{data} is a file and has no splits; leave --split out")
    return {ROWS: read_rows(data)}


def data_digest(data: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; of a folder, that of what `sha256sum` prints of all that is read.

    Raises SpecError and OSError.
    """
    if not data.is_dir():
        return digest_of([data])
    files = [file.path for file in data_folder(data).files]
    infos = {path.with_name(INFO) for path in files}  # say what the numbers of classes mean
    read = sorted([*files, *filter(Path.is_file, infos)])
    lines = [f"{digest_of([path])}  {path.relative_to(data).as_posix()}\n" for path in read]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def data_folder(root: Path) -> DataFolder:
    """Return the data files in `root`. Raises SpecError if there are none."""
    paths = [path for path in sorted(root.rglob("*")) if SUFFIXES.search(path.name) and path.is_file()]
    files = [file for path in paths if (file := _data_file(root, path)) is not None]
    if any(file.part == CORPUS for file in files):  # mteb/* has the relevance of documents in data/ or default/
        files = [replace(file, part=QRELS if file.part == ROWS else file.part) for file in files]
    if not files:
        raise SpecError(f"{root} has no data: expected *.jsonl, *.parquet, *.tsv, or the *.arrow of save_to_disk")
    return DataFolder(root, tuple(files))


def _data_file(root: Path, path: Path) -> DataFile | None:
    """Return a file with its part and split; None for one of another configuration of the same repository."""
    *folders, name = path.relative_to(root).parts
    words = dict.fromkeys((*folders, SHARD.sub("", SUFFIXES.sub("", name))))
    parts = [PARTS[word] for word in words if word in PARTS]
    splits = [word for word in words if word not in PARTS and word not in WITHOUT_MEANING]
    if len(parts) > 1 or len(splits) > 1:
        return None
    return DataFile(path, parts[0] if parts else ROWS, splits[0] if splits else "")
