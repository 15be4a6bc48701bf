"""Weights that stay in a file: a graph with many weights refers to the file, which is mapped while they are read.

Such a tensor records its place as ONNX does (onnx, docs/ExternalData.md): with the whole path of the file while the
graph is in memory, with the file's name in a graph on disk. A tensor that is in no file yet names a function of this
process, which computes its rows when they are read: weights that are computed on their way to a file need no place of
their own. Graphs that have nearly the same weights have one file of them, under a name beside each. Knows tensors and
files; knows nothing about their meaning.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.common.files import link

MIN_FILE_BYTES = 1024  # bytes of a tensor that has its place in a file
ALIGNED = 4096  # a page, so that each can be mapped as it is
PIECE = 1 << 22  # bytes that are computed and written at once
MIN_FILE_SHARE = 0.95  # least share of a graph's weights, and of a file's, for the graph to refer to that file
MAX_INLINE_BYTES = 1 << 24  # most bytes of its own weights that such a graph stores inside

Rows = Callable[[slice], np.ndarray]  # those rows of a weight

_computed: dict[str, Rows] = {}  # by the location in the tensor
_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """Position of a tensor's values: `length` bytes from `offset` on, in numpy's layout."""

    file: Path
    offset: int
    length: int


def place_of(tensor: TensorProto) -> Place | None:
    """Return the place of the values; None if they are in the tensor itself."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return Place(Path(entries["location"]), int(entries.get("offset", "0")), int(entries["length"]))


def size_of(tensor: TensorProto) -> int:
    """Return the bytes of the values, wherever they are."""
    place = place_of(tensor)
    return len(tensor.raw_data) if place is None else place.length


def values_of(tensor: TensorProto) -> np.ndarray:
    """Return the values: mapped, if they are in a file."""
    place = place_of(tensor)
    if place is None:
        return numpy_helper.to_array(tensor)
    if _is_computed(place):
        return _computed[str(place.file)](slice(None))
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(place.file, dtype, "r", place.offset, tuple(tensor.dims))


def rows_of(tensor: TensorProto) -> Rows:
    """Return a reader of rows of the values, which stays valid if `tensor` changes."""
    place = place_of(tensor)
    if place is not None and _is_computed(place):
        return _computed[str(place.file)]
    values = values_of(tensor)
    return lambda rows: values[rows]


def _is_computed(place: Place) -> bool:
    return str(place.file) in _computed


@contextmanager
def computing() -> Iterator[None]:
    """Let tensors be computed when they are read, within the `with`; free what they need after it."""
    before = set(_computed)
    try:
        yield
    finally:
        for location in set(_computed) - before:
            del _computed[location]


def computed(name: str, kind: int, dims: Sequence[int], rows: Rows) -> TensorProto:
    """Return a tensor of ONNX's type `kind` and of `dims`, the first of them its rows, which `rows` computes."""
    described = TensorProto(name=name, dims=dims, data_type=kind)
    location = f"computed-{next(_numbers)}"
    _computed[location] = rows
    return _at(described, location, 0, math.prod(dims) * helper.tensor_dtype_to_np_dtype(kind).itemsize)


def made_of(source: TensorProto, name: str, dims: Sequence[int], rows: Rows) -> TensorProto:
    """Return a tensor computed from `source` with its type; lazily when it is read, if `source` is computed so."""
    place = place_of(source)
    if place is not None and _is_computed(place):
        return computed(name, source.data_type, dims, rows)
    return numpy_helper.from_array(np.ascontiguousarray(rows(slice(None))), name)


def point_to(model: onnx.ModelProto, folder: Path) -> None:
    """Write the whole path, in place, into tensors whose values are in files of `folder`."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(folder / entry.value)


def take_in(graph: onnx.GraphProto) -> None:
    """Load the values of all tensors into the tensors themselves, in place."""
    for tensor in graph.initializer:
        if place_of(tensor) is not None:
            tensor.CopyFrom(numpy_helper.from_array(np.array(values_of(tensor)), tensor.name))


def beside(model: onnx.ModelProto, data: Path) -> onnx.ModelProto:
    """Return `model` with its weights in the file `data`.

    That is another name of the file that has nearly all of them, if there is one: the few others are inside. Else
    values that are there already stay there, and the rest is written one tensor after the other.
    """
    outline = onnx.ModelProto()
    _copy(model, outline)
    shared = _shared(model.graph.initializer)
    if shared is None:
        outline.graph.initializer.extend(_written(model.graph.initializer, data))
        return outline
    outline.graph.initializer.extend(_named(tensor, shared, data) for tensor in model.graph.initializer)
    if shared != data:  # in which values of those tensors may have been until now
        data.unlink(missing_ok=True)
        link(shared, data)
    return outline


def _shared(tensors: Sequence[TensorProto]) -> Path | None:
    """Return the file that has nearly all of `tensors` and little else; None if there is none."""
    held: dict[Path, int] = {}
    for tensor in tensors:
        place = place_of(tensor)
        if place is not None and not _is_computed(place):
            held[place.file] = held.get(place.file, 0) + place.length
    most = max(held, key=held.__getitem__, default=None)
    if most is None:
        return None
    own = sum(map(size_of, tensors)) - held[most]
    little = own <= min(MAX_INLINE_BYTES, (1 - MIN_FILE_SHARE) * held[most])
    return most if little and held[most] >= MIN_FILE_SHARE * most.stat().st_size else None


def _named(tensor: TensorProto, shared: Path, data: Path) -> TensorProto:
    """Return `tensor` with its values in `data`, which is `shared`, or inside."""
    place = place_of(tensor)
    if place is not None and place.file == shared:
        described = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        return _at(described, data.name, place.offset, place.length)
    return tensor if place is None else numpy_helper.from_array(values_of(tensor), tensor.name)


def _written(tensors: Sequence[TensorProto], data: Path) -> list[TensorProto]:
    """Return `tensors` with their values in `data`, behind those that are in it already."""
    places = [place_of(tensor) for tensor in tensors]
    if not any(place is not None and place.file == data for place in places):
        data.unlink(missing_ok=True)  # it may be a file of others too
    elif data.stat().st_nlink > 1:
        own = data.with_name(f".{data.name}")
        shutil.copyfile(data, own)
        own.replace(data)
    with data.open("r+b" if data.exists() else "wb") as file:
        return [moved(tensor, file, data) for tensor in tensors]


def _copy(source: Any, target: Any) -> None:
    """Copy all of a model except its weights."""
    for field, value in source.ListFields():
        if field.name == "graph":
            _copy(value, target.graph)
        elif field.name != "initializer":
            target.MergeFrom(type(source)(**{field.name: value}))


def moved(tensor: TensorProto, file: BinaryIO, data: Path) -> TensorProto:
    """Return `tensor` with its values at the end of `file`, which is `data`.

    Values that are there already keep their place; few values stay in the tensor itself.
    """
    place = place_of(tensor)
    described = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
    if place is not None and place.file == data:
        return _at(described, data.name, place.offset, place.length)
    if size_of(tensor) < MIN_FILE_BYTES:
        return tensor if place is None else numpy_helper.from_array(values_of(tensor), tensor.name)
    offset = -(-file.seek(0, os.SEEK_END) // ALIGNED) * ALIGNED
    file.seek(offset)
    for piece in pieces(tensor):
        file.write(piece)
    return _at(described, data.name, offset, size_of(tensor))


def pieces(tensor: TensorProto) -> Iterator[memoryview]:
    """Yield the bytes of the values: of computed ones some rows at once."""
    place = place_of(tensor)
    if place is None:
        yield memoryview(tensor.raw_data)
    elif not _is_computed(place):
        yield np.memmap(place.file, np.uint8, "r", place.offset, (place.length,)).data
    else:
        rows, step = rows_of(tensor), max(1, PIECE * tensor.dims[0] // place.length)
        for start in range(0, tensor.dims[0], step):
            yield np.ascontiguousarray(rows(slice(start, start + step))).reshape(-1).view(np.uint8).data


def _at(described: TensorProto, location: str, offset: int, length: int) -> TensorProto:
    described.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        described.external_data.add(key=key, value=str(value))
    return described
