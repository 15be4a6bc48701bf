"""Data files and folders, as the Hub and `datasets` lay them out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars
import pytest

from builder.common.data_files import read_rows
from builder.common.data_folders import (
    CANDIDATES,
    CORPUS,
    INSTRUCTIONS,
    QRELS,
    QUERIES,
    ROWS,
    data_digest,
    data_folder,
    read_parts,
)
from builder.common.errors import SpecError
from builder.common.hashing import sha256_of

LABEL = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}
TAGS = {"tags": {"feature": {"names": ["O", "B-PER"], "_type": "ClassLabel"}, "_type": "List"}}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        polars.DataFrame(rows).write_parquet(path)
    elif path.suffix == ".arrow":
        polars.DataFrame(rows).write_ipc_stream(path)
    elif path.suffix == ".tsv":
        lines = [list(rows[0]), *(row.values() for row in rows)]
        path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines), "utf-8")
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.arrow", "rows.txt"])
def test_rows_are_read_in_every_format(tmp_path: Path, name: str) -> None:
    rows = [{"text": "Grüße\u2028aus Łódź", "tokens": ["a", "b"]}, {"text": "b", "tokens": []}]
    assert read_rows(write(tmp_path / name, rows)) == rows


def test_rows_of_gzipped_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": "b"}\n'))
    assert read_rows(file) == [{"text": "a"}, {"text": "b"}]


def test_rows_have_names_of_classes(tmp_path: Path) -> None:
    rows = [{"label": 1, "tags": [0, 1]}, {"label": -1, "tags": []}]
    named = [{"label": "pos", "tags": ["O", "B-PER"]}, {"label": None, "tags": []}]
    arrow = write(tmp_path / "data-00000-of-00001.arrow", rows)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": {**LABEL, **TAGS}}))
    assert read_rows(arrow) == named
    parquet = tmp_path / "test.parquet"
    features = json.dumps({"info": {"features": {**LABEL, **TAGS}}})
    polars.DataFrame(rows).write_parquet(parquet, metadata={"huggingface": features})
    assert read_rows(parquet) == named


@pytest.mark.parametrize("content", [b'{"a": 1}\n{"a": \n', b"[1]\n", b'{"a": 1}\n"x"\n'])
def test_rows_that_are_not_objects_are_refused_by_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=r"rows.jsonl, line \d"):
        read_rows(file)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl"])
def test_missing_and_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        read_rows(tmp_path / name)
    (tmp_path / name).write_bytes(b"\x00damaged")
    with pytest.raises(SpecError, match=name):
        read_rows(tmp_path / name)


LAYOUTS = {
    "BEIR": {CORPUS: "corpus.jsonl", QUERIES: "queries.jsonl", QRELS: "qrels/test.tsv"},
    "mteb, jsonl": {CORPUS: "corpus.jsonl", QUERIES: "queries.jsonl", QRELS: "qrels/test.jsonl"},
    "mteb, parquet": {
        CORPUS: "corpus/test-00000-of-00001.parquet",
        QUERIES: "queries/test-00000-of-00001.parquet",
        QRELS: "data/test-00000-of-00001.parquet",
        CANDIDATES: "top_ranked/test-00000-of-00001.parquet",
        INSTRUCTIONS: "instruction/test-00000-of-00001.parquet",
    },
    "mteb, own split of the corpus": {
        CORPUS: "corpus/corpus-00000-of-00001.parquet",
        QUERIES: "queries/queries-00000-of-00001.parquet",
        QRELS: "default/test-00000-of-00001.parquet",
    },
    "Nano": {
        CORPUS: "corpus/train-00000-of-00001.parquet",
        QUERIES: "queries/train-00000-of-00001.parquet",
        QRELS: "qrels/train-00000-of-00001.parquet",
    },
    "save_to_disk": {
        CORPUS: "corpus/data-00000-of-00001.arrow",
        QUERIES: "queries/data-00000-of-00001.arrow",
        QRELS: "qrels/test/data-00000-of-00001.arrow",
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_have_parts(tmp_path: Path, layout: str) -> None:
    for part, name in LAYOUTS[layout].items():
        write(tmp_path / name, [{"part": part}])
    write(tmp_path / "notes" / "test.parquet", [{"part": "another"}])
    write(tmp_path / "other" / "folder" / "test.jsonl", [{"part": "another"}])
    expected = {part: [{"part": part}] for part in LAYOUTS[layout]}
    selected = data_folder(tmp_path).select("train" if layout == "Nano" else "test")
    assert {part: selected[part] for part in expected} == expected


def test_folder_with_a_split_for_each_set(tmp_path: Path) -> None:
    for name in ("NanoNQ", "NanoSciFact"):
        for part in ("corpus", "queries", "qrels", "bm25"):
            write(tmp_path / part / f"{name}-00000-of-00001.parquet", [{"name": name}])
    folder = data_folder(tmp_path)
    with pytest.raises(SpecError, match="--split: NanoNQ or NanoSciFact"):
        folder.select(None)
    assert folder.select("NanoNQ") == {part: [{"name": "NanoNQ"}] for part in (CORPUS, QUERIES, QRELS, CANDIDATES)}


def test_folder_with_parts_for_each_language(tmp_path: Path) -> None:
    """Regression: mteb's multilingual repositories name their parts `de-corpus`, which was no part."""
    for language in ("de", "en"):
        for part in ("corpus/dev", "corpus/train", "queries/test", "qrels/test", "top_ranked/test"):
            write(tmp_path / f"{language}-{part}-00000-of-00001.parquet", [{"file": f"{language} {part}"}])
    folder = data_folder(tmp_path)
    with pytest.raises(SpecError, match="--split: de/test or en/test"):
        folder.select(None)
    assert folder.select("de/test") == {
        CORPUS: [{"file": "de corpus/dev"}, {"file": "de corpus/train"}],  # it has no split `test`
        QUERIES: [{"file": "de queries/test"}],
        QRELS: [{"file": "de qrels/test"}],
        CANDIDATES: [{"file": "de top_ranked/test"}],
    }


@pytest.mark.parametrize("one_corpus", [False, True])
def test_beir_folder_for_each_language(tmp_path: Path, one_corpus: bool) -> None:
    """Regression: their qrels were ignored, and the error said that there were none."""
    corpora = {language: "corpus.jsonl" if one_corpus else f"{language}/corpus.jsonl" for language in ("de", "en")}
    for language, corpus in corpora.items():
        for name in (corpus, f"{language}/queries.jsonl", f"{language}/qrels/test.tsv", f"{language}/qrels/dev.tsv"):
            write(tmp_path / name, [{"file": name}])
    with pytest.raises(SpecError, match="--split: de/dev or de/test or en/dev or en/test"):
        read_parts(tmp_path)
    assert read_parts(tmp_path, "de/test") == {
        CORPUS: [{"file": corpora["de"]}],
        QUERIES: [{"file": "de/queries.jsonl"}],
        QRELS: [{"file": "de/qrels/test.tsv"}],
    }


def test_subset_has_no_rows_of_files_beside_it(tmp_path: Path) -> None:
    """Regression: the rows of `de/test` had those of the default subset's `test` among them, and so had its corpus."""
    for name in ("data/test", "de/test", "de/train"):
        write(tmp_path / "rows" / f"{name}-00000-of-00001.parquet", [{"file": name}])
    assert read_parts(tmp_path / "rows", "de/test") == {ROWS: [{"file": "de/test"}]}
    for name in ("corpus/test", "queries/test", "qrels/test", "de-queries/test", "de-qrels/test"):
        write(tmp_path / "retrieval" / f"{name}-00000-of-00001.parquet", [{"file": name}])
    assert read_parts(tmp_path / "retrieval", "de/test") == {
        CORPUS: [{"file": "corpus/test"}],  # of all languages
        QUERIES: [{"file": "de-queries/test"}],
        QRELS: [{"file": "de-qrels/test"}],
    }


def test_rows_beside_qrels_are_no_relevance(tmp_path: Path) -> None:
    """Regression: they were read as qrels, and their name was offered as a split."""
    for name in ("corpus.jsonl", "queries.jsonl", "qrels.tsv", "predictions.jsonl"):
        write(tmp_path / name, [{"file": name}])
    assert read_parts(tmp_path)[QRELS] == [{"file": "qrels.tsv"}]


@pytest.mark.parametrize("names", [["search-queries.jsonl"], ["corpus.jsonl", "queries.jsonl"]])
def test_folder_without_rows_and_qrels_is_refused(tmp_path: Path, names: list[str]) -> None:
    """Regression: the error said to choose a split, of none."""
    for name in names:
        write(tmp_path / name, [{"text": "a"}])
    with pytest.raises(SpecError, match="queries, but neither qrels nor other rows"):
        read_parts(tmp_path)


@pytest.mark.parametrize("name", ["{language}/{split}-00000-of-00001.parquet", "{split}/{language}.jsonl"])
def test_folder_of_rows_for_each_language(tmp_path: Path, name: str) -> None:
    """Regression: files below a language and a split were ignored, and the folder had no data."""
    for language in ("de", "en"):
        for split in ("test", "train"):
            write(tmp_path / name.format(language=language, split=split), [{"file": f"{language} {split}"}])
    requested = name.split("-0")[0].removesuffix(".jsonl").format(language="en", split="test")
    with pytest.raises(SpecError, match=f"--split: .*{requested}"):
        read_parts(tmp_path)
    assert read_parts(tmp_path, requested) == {ROWS: [{"file": "en test"}]}


def test_folder_of_the_hub_cache_gives_its_current_snapshot(tmp_path: Path) -> None:
    """Regression: the names of snapshots were taken for splits, and the folder had no data."""
    root = tmp_path / "datasets--zeta-alpha-ai--NanoMSMARCO"
    (root / "refs").mkdir(parents=True)
    for commit in ("0" * 40, "1" * 40):
        for part in ("corpus", "queries", "qrels"):
            blob = write(tmp_path / "rows.parquet", [{"file": f"{part} {commit[0]}"}])
            stored = root / "blobs" / sha256_of(blob)
            stored.parent.mkdir(exist_ok=True)
            blob.rename(stored)
            link = root / "snapshots" / commit / part / "train-00000-of-00001.parquet"
            link.parent.mkdir(parents=True)
            link.symlink_to(Path("../../../blobs") / stored.name)
        (root / "refs" / "main").write_text(commit)
    expected = {part: [{"file": f"{part} 1"}] for part in (CORPUS, QUERIES, QRELS)}
    assert read_parts(root) == expected
    assert read_parts(root / "snapshots" / ("1" * 40)) == expected
    assert data_digest(root) == data_digest(root / "snapshots" / ("1" * 40))


def test_folder_of_rows_gives_its_test_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / split / "data-00000-of-00002.arrow", [{"split": split, "shard": 0}])
        write(tmp_path / split / "data-00001-of-00002.arrow", [{"split": split, "shard": 1}])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    folder = data_folder(tmp_path)
    assert folder.select(None) == {ROWS: [{"split": "test", "shard": 0}, {"split": "test", "shard": 1}]}
    assert folder.select("train")[ROWS][0]["split"] == "train"
    with pytest.raises(SpecError, match=r"no split 'dev'.*test or train"):
        folder.select("dev")


def test_missing_split_is_refused_with_the_advice_of_the_caller(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        write(tmp_path / split / "data-00000-of-00001.arrow", [{"split": split}])
    with pytest.raises(SpecError, match="no split 'test': give the file of one split: dev or train"):
        read_parts(tmp_path, advice="give the file of one split")


def test_digest_of_a_folder_covers_names_and_what_describes_the_rows(tmp_path: Path) -> None:
    """Regression: files with exchanged names, and other names of classes, had the digest of the first."""
    one, other, info = tmp_path / "corpus.jsonl", tmp_path / "queries.jsonl", tmp_path / "dataset_info.json"
    one.write_text("one")
    other.write_text("other")
    digests = [data_digest(tmp_path)]
    one.write_text("other")
    other.write_text("one")
    digests.append(data_digest(tmp_path))
    info.write_text("{}")
    digests.append(data_digest(tmp_path))
    (tmp_path / "README.md").write_text("not read")
    assert len({*digests, data_digest(tmp_path)}) == 3
    assert data_digest(one) == sha256_of(one)


def test_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no data"):
        data_folder(tmp_path)
