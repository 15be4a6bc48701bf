"""Open ONNX Runtime's sessions on a GPU, and keep a cache there. Knows nothing about requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import Session
from ...sessions import onnxruntime, refuse_version_mismatch
from .base import TOP_TOKENS, Geometry

ELEMENTS = {"float16": 10, "bfloat16": 16, "float32": 1}  # of onnx.TensorProto: numpy has no bfloat16
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}


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

    `copier`: a graph that returns its inputs, a piece of each tensor, and so copies them within the device; it ignores
    the order of a piece's axes.
    """

    def __init__(self, device: Device, copier: Path, geometry: Geometry, pieces: int, tokens: int) -> None:
        self.device, self.copier = device, device.open(copier)
        self.element, self.width = ELEMENTS[geometry.cache], BYTES[geometry.cache]
        self.shapes = {
            f"{kind}_{index}": (heads, tokens, size)
            for index, (heads, size) in enumerate(geometry.layers)
            for kind in ("key", "value")
        }
        self.tensors = {
            name: onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                (pieces, *shape), self.element, device.kind, device.number
            )
            for name, shape in self.shapes.items()
        }
        nothing = {name: np.zeros(math.prod(shape), f"V{self.width}") for name, shape in self.shapes.items()}
        for piece in range(pieces):  # the allocated memory may have held NaN, which masking does not remove
            self._copy_from({name: ("cpu", 0, array.ctypes.data) for name, array in nothing.items()}, piece)

    def copy(self, source: int, target: int) -> None:
        kind, number = self.device.kind, self.device.number
        self._copy_from({name: (kind, number, self.address(name, source)) for name in self.shapes}, target)

    def region(self, name: str, first: int, shape: "tuple[int, ...]") -> "tuple[str, int, int, tuple[int, ...], int]":
        """Return the binding arguments of the pieces from `first` on, which together have `shape`."""
        return self.device.kind, self.device.number, self.element, shape, self.address(name, first)

    def address(self, name: str, piece: int) -> int:
        return int(self.tensors[name].data_ptr()) + piece * math.prod(self.shapes[name]) * self.width

    def _copy_from(self, sources: "Mapping[str, tuple[str, int, int]]", target: int) -> None:
        """Fill a piece from the memory at `sources`: device, its number, address, by the name of the tensor."""
        binding = self.copier.io_binding()
        for name, (kind, number, address) in sources.items():
            shape = (1, *self.shapes[name])
            binding.bind_input(name, kind, number, self.element, shape, address)
            binding.bind_output(f"{name}_copy", *self.region(name, target, shape))
        binding.synchronize_inputs()
        self.copier.run_with_iobinding(binding)
        binding.synchronize_outputs()


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
