"""Read the rows of a data file: JSON lines or TSV; parquet and the Arrow files of `datasets` with the extra `evaluate`.

Class numbers whose names are in the file, or beside it, become these names (datasets, features/features.py, 5.2).
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from builder.common.distribution import installing
from builder.common.errors import SpecError, first_line

Row = Mapping[str, Any]
INFO = "dataset_info.json"  # beside the Arrow files of Dataset.save_to_disk
METADATA = "huggingface"  # key of a parquet file's metadata that `datasets` writes


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file: of parquet, Arrow or TSV by its name, otherwise of JSON lines, perhaps gzipped.

    Raises SpecError.
    """
    try:
        return READERS.get(path.suffix, _json_lines)(path)
    except SpecError:
        raise
    except Exception as error:  # polars and csv raise errors of many types for a damaged file
        raise SpecError(f"{path} cannot be read ({first_line(error)}); name a whole file of rows") from error


def _json_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        return [_json_object(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}, is not JSON: {error}; expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise SpecError(f"{where}: expected a JSON object, found {line.decode('utf-8', 'replace').strip()[:80]}")
    return row


def _tsv(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def _parquet(path: Path) -> list[dict[str, Any]]:
    polars = _polars(path)
    described = json.loads(polars.read_parquet_metadata(path).get(METADATA, "{}"))
    return _named(polars.read_parquet(path).to_dicts(), described.get("info", {}).get("features") or {})


def _arrow(path: Path) -> list[dict[str, Any]]:
    info = path.with_name(INFO)
    described = json.loads(info.read_text("utf-8")) if info.is_file() else {}
    return _named(_polars(path).read_ipc_stream(path).to_dicts(), described.get("features") or {})


def _polars(path: Path) -> Any:
    try:
        import polars
    except ImportError as error:
        raise SpecError(f"{path.name} needs polars to be read: {installing('evaluate')}") from error
    return polars


def _named(rows: list[dict[str, Any]], features: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Put the names of classes in the place of their numbers."""
    for column, names in ((column, _class_names(feature)) for column, feature in features.items()):
        for row in rows if names else ():
            row[column] = _name(row[column], names)
    return rows


def _class_names(feature: Any) -> list[str]:
    """Return the names of a ClassLabel, or of a list of them; none for another feature."""
    inner = feature[0] if isinstance(feature, list) else feature
    if not isinstance(inner, Mapping):
        return []
    if inner.get("_type") == "ClassLabel":
        return list(inner.get("names") or [])
    return _class_names(inner.get("feature"))


def _name(value: Any, names: list[str]) -> Any:
    if isinstance(value, list):
        return [_name(item, names) for item in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


READERS: Mapping[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".arrow": _arrow,
    ".parquet": _parquet,
    ".tsv": _tsv,
}
