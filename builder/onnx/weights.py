"""Weights that stay in a file: a graph of many says where they are, and they are mapped while they are read.

Such a tensor says its place as ONNX does (onnx, docs/ExternalData.md): with the whole path of the file while the graph
is at hand, with the file's name in a graph on disk. Knows tensors and files; knows nothing of what they mean.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LEAST = 1024  # bytes of a tensor that has its place in a file
ALIGNED = 4096  # a page, so that each can be mapped as it is
ROOM = ".room"  # what a file is called in which rewrites of a graph may put more


@dataclass(frozen=True)
class Place:
    """Where the values of a tensor are: `length` bytes from `offset` on, as numpy has them."""

    file: Path
    offset: int
    length: int


def place_of(tensor: TensorProto) -> Place | None:
    """None where the values are in the tensor itself."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return Place(Path(entries["location"]), int(entries.get("offset", "0")), int(entries["length"]))


def size_of(tensor: TensorProto) -> int:
    """Bytes of the values, wherever they are."""
    place = place_of(tensor)
    return len(tensor.raw_data) if place is None else place.length


def values_of(tensor: TensorProto) -> np.ndarray:
    """The values: mapped, where they are in a file."""
    place = place_of(tensor)
    if place is None:
        return numpy_helper.to_array(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(place.file, dtype, "r", place.offset, tuple(tensor.dims))


def made_of(source: TensorProto, made: np.ndarray, name: str) -> TensorProto:
    """A tensor of what was `made` of `source`, in the same file where rewrites may put more into that."""
    place = place_of(source)
    if place is None or place.file.suffix != ROOM or made.nbytes < LEAST:
        return numpy_helper.from_array(made, name)
    with place.file.open("r+b") as file:
        described = TensorProto(name=name, dims=made.shape, data_type=helper.np_dtype_to_tensor_dtype(made.dtype))
        return _put(file, str(place.file), described, made)


def point_to(model: onnx.ModelProto, folder: Path) -> None:
    """In place: tensors whose values are in files of `folder` say so with the whole path."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(folder / entry.value)


def take_in(graph: onnx.GraphProto) -> None:
    """In place: the values of all tensors into the tensors themselves."""
    for tensor in graph.initializer:
        if place_of(tensor) is not None:
            tensor.CopyFrom(numpy_helper.from_array(np.array(values_of(tensor)), tensor.name))


def beside(model: onnx.ModelProto, data: Path) -> onnx.ModelProto:
    """`model` with its weights in the file `data`: what is there already stays there, the rest is written one tensor
    after the other."""
    outline = onnx.ModelProto()
    _copy(model, outline)
    if not any(_is_in(data, tensor) for tensor in model.graph.initializer):
        data.unlink(missing_ok=True)  # it may be a file of others too
    with data.open("r+b" if data.exists() else "wb") as file:
        outline.graph.initializer.extend(_moved(tensor, file, data) for tensor in model.graph.initializer)
    return outline


def _is_in(data: Path, tensor: TensorProto) -> bool:
    place = place_of(tensor)
    return place is not None and place.file == data


def _copy(source: Any, target: Any) -> None:
    """All of a model but its weights."""
    for field, value in source.ListFields():
        if field.name == "graph":
            _copy(value, target.graph)
        elif field.name != "initializer":
            target.MergeFrom(type(source)(**{field.name: value}))


def _moved(tensor: TensorProto, file: BinaryIO, data: Path) -> TensorProto:
    place = place_of(tensor)
    described = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
    if place is not None and place.file == data:
        return _at(described, data.name, place.offset, place.length)
    if size_of(tensor) < LEAST:
        return tensor
    if place is None:
        content = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        content = np.memmap(place.file, np.uint8, "r", place.offset, (place.length,))
    return _put(file, data.name, described, content)


def _put(file: BinaryIO, location: str, described: TensorProto, content: np.ndarray) -> TensorProto:
    """`described` with its place at the end of `file`, where `content` is written."""
    offset = -(-file.seek(0, os.SEEK_END) // ALIGNED) * ALIGNED
    file.seek(offset)
    file.write(np.ascontiguousarray(content).reshape(-1).view(np.uint8).data)
    return _at(described, location, offset, content.nbytes)


def _at(described: TensorProto, location: str, offset: int, length: int) -> TensorProto:
    described.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        described.external_data.add(key=key, value=str(value))
    return described
