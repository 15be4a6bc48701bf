"""Open ONNX Runtime's sessions on a GPU, and keep a cache there. Knows nothing about requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import Session
from ...sessions import onnxruntime, refuse_version_mismatch
from .base import TOP_TOKENS, Geometry

ELEMENTS = {"float16": 10, "bfloat16": 16, "float32": 1}  # of onnx.TensorProto: numpy has no bfloat16
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
# Numbers of an output of Expand: its kernel counts them in int, and up to 1024 beyond their end (onnxruntime,
# providers/cuda/tensor/expand_impl.cu).
MAX_NUMBERS = 2**31 - 1024
TIMED_COPIES = 3


class Device:
    """Device on which graphs are opened and tensors are kept: a GPU, or the CPU for comparing a model's answers there.

    `options`: the device, its number, and the options of ONNX Runtime's execution provider.
    """

    def __init__(self, options: Session) -> None:
        self.options, self.kind, self.number = options, options.device, options.device_id

    def open(self, model: Path) -> onnxruntime.InferenceSession:
        """Open a session on this device only. Raises RuntimeError if this ONNX Runtime cannot."""
        provider = PROVIDERS[self.kind]
        if provider not in onnxruntime.get_available_providers():
            raise RuntimeError(
                f"this model runs on a GPU and onnxruntime {onnxruntime.__version__} here has no {provider}: install "
                "onnxruntime-gpu in the interpreter that Triton runs (requirements-gpu.txt)"
            )
        if self.kind == "cuda":
            load_cuda()
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = self.options.threads
        for key, value in self.options.entries.items():
            settings.add_session_config_entry(key, value)
        placed: "dict[str, str]" = {}
        if self.kind != "cpu":
            placed = {"device_id": str(self.number), **self.options.provider_options}
        session = onnxruntime.InferenceSession(
            str(model), settings, providers=[(provider, placed), "CPUExecutionProvider"] if placed else [provider]
        )
        if provider not in session.get_providers():
            raise RuntimeError(f"{provider} did not start on device {self.number}: are CUDA and cuDNN there?")
        refuse_version_mismatch(session)
        return session


class DeviceCache:
    """Keys and values of all layers on a device, in `pieces` of `tokens` tokens: slots, or blocks.

    `copier`: a graph that repeats its inputs, vectors, to given lengths. The session that runs it creates the tensors,
    so that they are in its arena, whose growth and limit are those of the options. A tensor that is created without a
    session is in an arena that doubles and has no limit.
    """

    def __init__(self, device: Device, copier: Path, geometry: Geometry, pieces: int, tokens: int) -> None:
        self.device, self.copier = device, device.open(copier)
        self.element, self.width = ELEMENTS[geometry.cache], BYTES[geometry.cache]
        self.shapes = {
            f"{kind}_{index}": (heads, tokens, size)
            for index, (heads, size) in enumerate(geometry.layers)
            for kind in ("key", "value")
        }
        # On the host, not copied when they are bound: each run reads them there.
        self.lengths = {length_name(heads, size): np.zeros(1, np.int64) for heads, _, size in self.shapes.values()}
        self.copied = ELEMENTS["float16"] if self.width == 2 else self.element  # type of the copier's vectors
        self.tensors = self._zeros(pieces)  # memory may have held NaN, which masking does not remove

    def copy(self, source: int, target: int) -> None:
        """Copy a piece, whatever the order of its axes."""
        binding = self._copying({name: math.prod(shape) for name, shape in self.shapes.items()})
        self._copy(binding, {name: (source, target, 0, math.prod(shape)) for name, shape in self.shapes.items()})

    def copy_range(self, source: int, target: int, start: int, end: int) -> None:
        """Copy the tokens `start` to `end` of a piece of (heads, tokens, size), a head of all layers at a time."""
        binding = self._copying({name: (end - start) * size for name, (_, _, size) in self.shapes.items()})
        for head in range(max(heads for heads, _, _ in self.shapes.values())):
            places = {}
            for name, (heads, tokens, size) in self.shapes.items():
                begin = (min(head, heads - 1) * tokens + start) * size
                places[name] = source, target, begin, (end - start) * size
            self._copy(binding, places)

    def longest_range(self) -> int:
        """Return how many tokens of a piece `copy_range` copies in less time than `copy` takes for all, timed here.

        The first two pieces must be empty. A range takes a run for each head, whose time without content is that of one
        token; its content takes at most its share of the time of a whole piece.
        """
        tokens = next(iter(self.shapes.values()))[1]
        of_runs = _shortest_s(lambda: self.copy_range(0, 1, 0, 1))
        of_all = _shortest_s(lambda: self.copy(0, 1))
        return max(0, int(tokens * (1 - of_runs / of_all)))

    def region(self, name: str, first: int, shape: "tuple[int, ...]") -> "tuple[str, int, int, tuple[int, ...], int]":
        """Return the binding arguments of the pieces from `first` on, which together have `shape`."""
        return self.device.kind, self.device.number, self.element, shape, self.address(name, first)

    def address(self, name: str, piece: int) -> int:
        return int(self.tensors[name].data_ptr()) + piece * math.prod(self.shapes[name]) * self.width

    def _zeros(self, pieces: int) -> "dict[str, Any]":
        """Return the tensors, full of zeros, in memory of the copier's session.

        Raises RuntimeError for tensors that are too large.
        """
        largest = pieces * max(math.prod(shape) for shape in self.shapes.values())
        if largest > MAX_NUMBERS:
            raise RuntimeError(
                f"the keys of a layer are {largest} numbers, and CUDA's kernel that creates them takes {MAX_NUMBERS}: "
                "build with fewer --slots, a smaller --cache-gb or a lower --max-length"
            )
        zero = np.zeros(1, f"V{self.width}")
        binding = self._copying({name: pieces * math.prod(shape) for name, shape in self.shapes.items()})
        for name in self.shapes:
            binding.bind_input(name, "cpu", 0, self.copied, (1,), zero.ctypes.data)
            binding.bind_output(f"{name}_copy", self.device.kind, self.device.number)
        self._run(binding)
        return dict(zip(self.shapes, binding.get_outputs()))

    def _copying(self, lengths: "Mapping[str, int]") -> Any:
        """Return a binding of the copier to the `lengths` of its outputs, by tensor; equal for layers of one shape."""
        binding = self.copier.io_binding()
        for name, (heads, _, size) in self.shapes.items():
            length = self.lengths[length_name(heads, size)]
            length[0] = lengths[name]
            binding.bind_input(length_name(heads, size), "cpu", 0, np.int64, (1,), length.ctypes.data)
        return binding

    def _copy(self, binding: Any, places: "Mapping[str, tuple[int, int, int, int]]") -> None:
        """Copy numbers of each tensor: from a piece, to a piece, at which of their numbers, and how many."""
        kind, number = self.device.kind, self.device.number
        for name, (source, target, begin, count) in places.items():
            offset = begin * self.width
            binding.bind_input(name, kind, number, self.copied, (count,), self.address(name, source) + offset)
            copied = self.address(name, target) + offset
            binding.bind_output(f"{name}_copy", kind, number, self.copied, (count,), copied)
        self._run(binding)

    def _run(self, binding: Any) -> None:
        binding.synchronize_inputs()
        self.copier.run_with_iobinding(binding)
        binding.synchronize_outputs()


def _shortest_s(call: "Callable[[], None]") -> float:
    """Return the shortest of a few times that `call` takes, after one that is not timed, in seconds."""
    call()
    times = []
    for _ in range(TIMED_COPIES):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def length_name(heads: int, size: int) -> str:
    """Return the copier's input with the length of its vectors, for layers of a shape."""
    return f"length_{heads}x{size}"


def run_bound(session: onnxruntime.InferenceSession, binding: Any, feeds: "Mapping[str, np.ndarray]") -> None:
    """Run with the small inputs bound anew: a host buffer is copied to the device when it is bound, not later.

    Source: IOBinding::BindInput, onnxruntime/core/session/IOBinding.cc (CopyOneInputAcrossDevices).
    """
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    binding.synchronize_inputs()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()


def candidates_of(session: onnxruntime.InferenceSession) -> int:
    """Return how many of the highest logits a graph finds."""
    return int({value.name: value.shape for value in session.get_outputs()}.get(TOP_TOKENS, [0])[-1])


def load_cuda() -> None:
    """Load CUDA's libraries from their packages, before a session or a tensor on the device uses them.

    A container whose own CUDA is of another major version has none that ONNX Runtime's provider would find.
    """
    if hasattr(onnxruntime, "preload_dlls"):  # since ONNX Runtime 1.21
        onnxruntime.preload_dlls()


def copy_to_host(capsule: Any) -> np.ndarray:
    """Copy the contents of a DLPack capsule from its device; on the CPU return that memory itself."""
    state = onnxruntime.capi.onnxruntime_pybind11_state
    copied: np.ndarray = state.OrtValue.from_dlpack(capsule, False).numpy()
    return copied
