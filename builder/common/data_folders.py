"""Find the data files of a folder as the Hub or `datasets` lays them out, with the part and the split of each.

Known are the layouts of BEIR (corpus.jsonl, queries.jsonl, qrels/test.tsv), of the repositories mteb/* and
zeta-alpha-ai/Nano* (a folder of parquet files for each part), of NanoBEIR-en (a split for each of its sets), of
Dataset.save_to_disk and DatasetDict.save_to_disk, and of a repository in the Hub's cache. The subset, the part and the
split of a file are words of its path in that order; mteb writes subset and part as one word, such as `de-corpus`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builder.common.data_files import INFO, read_rows
from builder.common.errors import SpecError
from builder.common.hashing import digest_of
from builder.common.hub_cache import current_snapshot

SUFFIXES = re.compile(r"\.(jsonl(\.gz)?|parquet|arrow|tsv)$")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
ROWS, CORPUS, QUERIES, QRELS = "rows", "corpus", "queries", "qrels"
CANDIDATES, INSTRUCTIONS = "candidates", "instructions"
PARTS = {
    "corpus": CORPUS,
    "queries": QUERIES,
    "query": QUERIES,
    "qrels": QRELS,
    "top_ranked": CANDIDATES,
    "bm25": CANDIDATES,
    "instruction": INSTRUCTIONS,
}
PART = re.compile(rf"(?:(?P<subset>.+)-)?(?P<part>{'|'.join(PARTS)})")
WITHOUT_MEANING = ("data", "default")  # words of paths that name neither a part nor a split
DEFAULT_SPLIT = "test"
CHOOSE = "choose one with --split"  # advice to the user


@dataclass(frozen=True)
class DataFile:
    """File of one part of the data. `subset` and `split` are "" if its path names none."""

    path: Path
    part: str
    subset: str
    split: str

    @property
    def split_name(self) -> str:
        """Name of the split with its subset, such as "de/test"; "" for neither."""
        return "/".join(filter(None, (self.subset, self.split)))


@dataclass(frozen=True)
class DataFolder:
    """Data files of a folder."""

    root: Path
    files: tuple[DataFile, ...]

    def select(self, split: str | None, advice: str = CHOOSE) -> Mapping[str, list[dict[str, Any]]]:
        """Return the rows of each part: those of the split, of a part that lacks it all those of its subset.

        A part without the subset has its rows outside of any, as a corpus that languages share. `split`: None for the
        only one, or else `test`. Raises SpecError, with `advice`, for a split that is not there.
        """
        chosen = self._choose(split, advice)
        rows: dict[str, list[dict[str, Any]]] = {}
        for part in dict.fromkeys(file.part for file in self.files):
            of_part = [file for file in self.files if file.part == part]
            subset = chosen.subset if any(file.subset == chosen.subset for file in of_part) else ""
            of_subset = [file for file in of_part if file.subset == subset]
            files = [file for file in of_subset if file.split == chosen.split] or of_subset
            if files:
                rows[part] = [row for file in files for row in read_rows(file.path)]
        return rows

    def _choose(self, requested: str | None, advice: str) -> DataFile:
        """Return a file of the split to evaluate: one of the relevance of documents, or else of the rows."""
        kind = QRELS if any(file.part == QRELS for file in self.files) else ROWS
        splits = {file.split_name: file for file in self.files if file.part == kind}
        if not splits:
            parts = " and ".join(sorted({file.part for file in self.files}))
            raise SpecError(f"{self.root} has {parts}, but neither qrels nor other rows: give the file, or add qrels")
        name = next(iter(splits)) if requested is None and len(splits) == 1 else requested or DEFAULT_SPLIT
        if name not in splits:
            found = " or ".join(filter(None, sorted(splits))) or "none"
            raise SpecError(f"{self.root} has no split {name!r}: {advice}: {found}")
        return splits[name]


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
    folder = data_folder(data)
    files = [file.path for file in folder.files]
    infos = {path.with_name(INFO) for path in files}  # say what the numbers of classes mean
    read = sorted([*files, *filter(Path.is_file, infos)])
    lines = [f"{digest_of([path])}  {path.relative_to(folder.root).as_posix()}\n" for path in read]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def data_folder(root: Path) -> DataFolder:
    """Return the data files in `root`. Raises SpecError if there are none."""
    root = current_snapshot(root)
    paths = [path for path in sorted(root.rglob("*")) if SUFFIXES.search(path.name) and path.is_file()]
    files = [file for path in paths if (file := _data_file(root, path)) is not None]
    found = {file.part for file in files}
    if CORPUS in found:
        files = [file for file in files if not _is_other(file, found)]
        files = [replace(file, part=QRELS) if file.part == ROWS else file for file in files]
    if not files:
        raise SpecError(f"{root} has no data: expected *.jsonl, *.parquet, *.tsv, or the *.arrow of save_to_disk")
    return DataFolder(root, tuple(files))


def _is_other(file: DataFile, found: Collection[str]) -> bool:
    """Return True for a file beside a corpus that is no part of retrieval, such as mteb's instructions.

    `found`: parts of the folder. Without qrels, rows in data/ or default/ are the relevance of documents, as in mteb/*.
    """
    return file.part == ROWS and (bool(file.subset) or QRELS in found)


def _data_file(root: Path, path: Path) -> DataFile | None:
    """Return a file with its part, subset and split; None if its path has more words than that."""
    *folders, name = path.relative_to(root).parts
    path_words = dict.fromkeys((*folders, SHARD.sub("", SUFFIXES.sub("", name))))
    words = [word for word in path_words if word not in WITHOUT_MEANING]
    named = {word: match for word in words if (match := PART.fullmatch(word))}
    rest = [word for word in words if word not in named]
    before = words.index(next(iter(named))) if named else len(rest) - 1  # of rows, the last word is the split
    parts = list(dict.fromkeys(PARTS[match["part"]] for match in named.values()))
    subsets = [*(match["subset"] for match in named.values() if match["subset"]), *rest[:before]]
    splits = rest[before:]
    if len(parts) > 1 or len(subsets) > 1 or len(splits) > 1:
        return None
    return DataFile(path, parts[0] if parts else ROWS, "".join(subsets), "".join(splits))
