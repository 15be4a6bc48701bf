"""A stand-in for a device: the part of onnxruntime that device.py uses, with CUDA's rules about memory.

Device addresses cannot be read by the process; a host buffer that is bound to an input is copied when
it is bound; a tensor must lie completely in one allocation that is not freed; element types and shapes
must match the graph; the device is unavailable before its libraries are loaded. ONNX Runtime computes on the CPU.

PagedAttention, for which ONNX Runtime has no CPU kernel, is replaced by standard operators
(builder/engines/cuda/on_cpu.py).

Rules: onnxruntime/core/session/IOBinding.cc (BindInput copies across devices at once, BindOutput at the end of a run),
onnxruntime/python/onnxruntime_pybind_iobinding.cc (bind_input), onnxruntime/__init__.py (preload_dlls),
onnxruntime/contrib_ops/cpu/bert/group_query_attention_helper.h (several tokens of several rows); of blocks:
blocks_of_the_device.py.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from builder.engines.cuda.on_cpu import on_cpu
from builder.graphs.onnx.graph import read_graph
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import TABLES
from tests.generation.blocks_of_the_device import refuse_blocks
from tests.generation.device_fault import DeviceFault

PROVIDER = "CUDAExecutionProvider"
BEGIN = 0x7F00_0000_0000_0000  # beyond the addresses of a process on x86-64, so that reading it crashes
TYPES = {1: "tensor(float)", 6: "tensor(int32)", 7: "tensor(int64)", 10: "tensor(float16)", 16: "tensor(bfloat16)"}
WIDTHS = {"tensor(float)": 4, "tensor(int32)": 4, "tensor(int64)": 8, "tensor(float16)": 2, "tensor(bfloat16)": 2}
ELEMENTS = {name: number for number, name in TYPES.items()}


@dataclass
class _Allocation:
    address: int
    content: np.ndarray  # bytes


class CopyingDevice:
    """Stand-in for the module `onnxruntime` in device.py."""

    __version__ = onnxruntime.__version__
    SessionOptions = onnxruntime.SessionOptions

    def __init__(self) -> None:
        self.loaded = False
        self.next = BEGIN
        self.allocations: weakref.WeakValueDictionary[int, _Allocation] = weakref.WeakValueDictionary()
        self.copied_to_device = 0  # bytes
        self.fetched: Counter[str] = Counter()  # outputs that were copied to the host
        self.calls: list[tuple[int, int]] = []  # rows and new tokens of each call of a decoder

    def preload_dlls(self) -> None:
        self.loaded = True

    def get_available_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def InferenceSession(self, model: str, options: Any, providers: list[Any]) -> _Session:
        if not self.loaded:
            raise DeviceFault("libcudart is not loaded: preload_dlls comes before the first session")
        if providers[0][0] != PROVIDER or providers[0][1]["device_id"] != "0":
            raise DeviceFault(f"there is one device, cuda:0, and the session is for {providers[0]}")
        graph = read_graph(Path(model))
        if graph.operators["PagedAttention"]:
            model = str(on_cpu(graph, graph.path.parent).path)
        return _Session(self, onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]))

    def allocate(self, size: int) -> _Allocation:
        content = np.full(size, 0xFF, np.uint8)  # NaN in every type of float: new memory holds what was there before
        allocation = _Allocation(self.next, content)
        self.next += size + 4096
        self.allocations[allocation.address] = allocation
        return allocation

    def memory(self, address: int, size: int) -> np.ndarray:
        """Return the bytes of the device at `address` as a view."""
        for allocation in self.allocations.values():
            start = address - allocation.address
            if start >= 0 and start + size <= len(allocation.content):
                return allocation.content[start : start + size]
        raise DeviceFault(f"{size} bytes at {address:#x} are not in one allocation of the device: illegal address")


class _DeviceValue:
    def __init__(self, allocation: _Allocation, shape: tuple[int, ...], element: int) -> None:
        self.allocation, self.shape, self.element = allocation, shape, element

    def data_ptr(self) -> int:
        return self.allocation.address

    def numpy(self) -> np.ndarray:
        kinds: dict[int, Any] = {1: np.float32, 10: np.float16}
        return self.allocation.content.copy().view(kinds[self.element]).reshape(self.shape)


class _Session:
    def __init__(self, device: CopyingDevice, session: onnxruntime.InferenceSession) -> None:
        self.device, self.session = device, session
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self.get_modelmeta = session.get_modelmeta

    def get_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def io_binding(self) -> _Binding:
        return _Binding(self.device, self.session)

    def run_with_iobinding(self, binding: _Binding) -> None:
        binding.run()


class _Binding:
    def __init__(self, device: CopyingDevice, session: onnxruntime.InferenceSession) -> None:
        self.device = device
        self.session = session
        self.binding = session.io_binding()
        self.inputs = {value.name: value for value in session.get_inputs()}
        self.outputs = {value.name: value for value in session.get_outputs()}
        self.held: dict[str, np.ndarray] = {}  # copies of host buffers, as CUDA keeps them
        self.fetched: dict[str, tuple[int, np.ndarray]] = {}  # host address, and the content for it
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}  # on the device
        self.created: dict[str, _DeviceValue | None] = {}  # outputs that the run puts into memory of its session
        self.synchronized = {"inputs": False, "outputs": True}

    def bind_input(self, name: str, device: str, number: int, element: Any, shape: Any, address: int) -> None:
        size = self._check(self.inputs[name], element, tuple(shape))
        self.shapes[name] = tuple(shape)
        if device == "cpu":
            self.held[name] = _host(address, size).copy()
            self.device.copied_to_device += size
        else:
            self.held[name] = self.device.memory(address, size)
            self.addresses[name] = address
        self.binding.bind_input(name, "cpu", 0, element, shape, self.held[name].ctypes.data)
        self.synchronized["inputs"] = False

    def bind_output(
        self, name: str, device: str, number: int, element: Any = None, shape: Any = None, address: int | None = None
    ) -> None:
        if address is None:
            if device != "cuda":
                raise DeviceFault(f"a tensor for the device is created on {device}")
            self.created[name] = None
            self.binding.bind_output(name, "cpu")
            return
        size = self._check(self.outputs[name], element, tuple(shape))
        if device == "cpu":
            content = np.zeros(size, np.uint8)
            _host(address, size)
            self.fetched[name] = address, content
        else:
            content = self.held[f"output {name}"] = self.device.memory(address, size)
            self.addresses[name] = address
        self.binding.bind_output(name, "cpu", 0, element, shape, content.ctypes.data)

    def synchronize_inputs(self) -> None:
        self.synchronized["inputs"] = True

    def synchronize_outputs(self) -> None:
        self.device.fetched.update(self.fetched.keys())
        for address, content in self.fetched.values():
            ctypes.memmove(address, content.ctypes.data, len(content))

    def run(self) -> None:
        missing = sorted(set(self.inputs) - set(self.held))
        if missing:
            raise DeviceFault(f"Missing Input: {', '.join(missing)}")
        if not self.synchronized["inputs"]:
            raise DeviceFault("the run began before the copies of its inputs had ended")
        if "input_ids" in self.shapes:
            self._note_step()
        self.session.run_with_iobinding(self.binding)
        for name, value in zip(self.created, self.binding.get_outputs() if self.created else (), strict=True):
            content = value.numpy()
            created = _DeviceValue(self.device.allocate(content.nbytes), content.shape, _number(content.dtype))
            created.allocation.content[:] = content.reshape(-1).view(np.uint8)
            self.created[name] = created

    def get_outputs(self) -> list[_DeviceValue | None]:
        return list(self.created.values())

    def _note_step(self) -> None:
        if "block_table" in self.shapes:
            tables = {n: self.held[n].view(np.int32).reshape(self.shapes[n]) for n in self.inputs if n in TABLES}
            refuse_blocks(tables, self.shapes, self.addresses)
            self.device.calls.append((len(tables["past_seqlens"]), self.shapes["input_ids"][1]))
            return
        rows, new = self.shapes["input_ids"]
        self.device.calls.append((rows, new))
        (total,) = self.held["total_sequence_length"].view(np.int32).tolist()
        if rows > 1 and new > 1 and total != new:
            raise DeviceFault("batch_size must be 1 when sequence_length > 1 and past context is given")

    def _check(self, value: Any, element: Any, shape: tuple[int, ...]) -> int:
        """Return the bytes of that tensor. Raises DeviceFault unless its type and shape fit the graph."""
        number = element if isinstance(element, int) else _number(element)
        if TYPES[number] != value.type:
            raise DeviceFault(f"{value.name} is {value.type}, and {TYPES[number]} is bound to it")
        same = len(shape) == len(value.shape) and all(
            a == b for a, b in zip(shape, value.shape, strict=True) if isinstance(b, int)
        )
        if not same:
            raise DeviceFault(f"{value.name} is {value.shape}, and {list(shape)} is bound to it")
        return math.prod(shape) * WIDTHS[value.type]


def _number(kind: Any) -> int:
    """Return the number of numpy's `kind` among ONNX's types."""
    names = {"float32": "float", "float16": "float16", "int32": "int32", "int64": "int64"}
    return ELEMENTS[f"tensor({names[np.dtype(kind).name]})"]


def _host(address: int, size: int) -> np.ndarray:
    """Return the bytes of this process at `address`."""
    if address >= BEGIN:
        raise DeviceFault(f"{address:#x} is on the device: the host cannot read it")
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
