"""Exports are made once a run: the same module, traced in the same way, gives the same graph to whoever asks next.

torch.export takes most of the time of a tiny build, and many tests build the same few checkpoints. What is kept lies
in the folder of the run, for all of its workers, and goes with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import onnx
import pytest
import torch
from transformers import PretrainedConfig

from builder.export.program import to_onnx

PLAIN = (str, int, float, bool, tuple, list, torch.dtype, type(None))
OF_A_COPY = {  # what differs in a model that was saved and loaded, its type apart: that is in its tensors
    "_name_or_path",
    "_use_kernels",
    "_weight_conversions",
    "architectures",
    "dtype",
    "name_or_path",
    "transformers_version",
}


@contextmanager
def kept_exports(folder: Path) -> Iterator[None]:
    """`to_onnx`, wherever the package calls it, reads from `folder` what was exported before."""
    folder.mkdir(parents=True, exist_ok=True)

    def kept(
        module: torch.nn.Module,
        tensors: Sequence[torch.Tensor],
        dynamic_axes: Sequence[Mapping[int, Any]],
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> onnx.ModelProto:
        module.eval()
        path = folder / f"{_key(module, tensors, dynamic_axes, inputs, outputs)}.onnx"
        with path.with_suffix(".lock").open("w") as lock:  # a worker that needs the same one waits for it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                model = to_onnx(module, tensors, dynamic_axes, inputs, outputs)
                path.write_bytes(model.SerializeToString())
            return onnx.load(str(path))

    with pytest.MonkeyPatch.context() as patch:
        for name, owner in list(sys.modules.items()):
            if name.startswith("builder.") and getattr(owner, "to_onnx", None) is to_onnx:
                patch.setattr(owner, "to_onnx", kept)
        yield


def _key(module: torch.nn.Module, tensors: Sequence[torch.Tensor], *signature: object) -> str:
    """A hash of all that an export depends on: code by its names, settings and weights by their values."""
    facts: list[object] = [signature, [(t.dtype, tuple(t.shape), t.tolist()) for t in tensors]]
    configs: dict[int, Any] = {}
    for name, part in module.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        facts.append((name, _name(type(part)), _name(part.forward), *map(_name, hooks)))
        for key, value in sorted(vars(part).items()):
            if isinstance(value, PretrainedConfig):
                configs[id(value)] = value
            elif isinstance(value, PLAIN) and key not in OF_A_COPY:
                facts.append((key, value))
            elif isinstance(value, FunctionType):
                facts.append((key, _name(value)))
            elif not key.startswith("_") and (isinstance(value, dict) or _name(type(part)).startswith("builder.")):
                facts.append((key, repr(value)))
    for owner in sorted({type(part).__module__ for part in module.modules()}):  # a function of it may be replaced
        functions = {key: code for key, code in vars(sys.modules[owner]).items() if isinstance(code, FunctionType)}
        facts.append([(key, _name(code)) for key, code in sorted(functions.items())])
    facts += [(config._attn_implementation, _settings(config)) for config in configs.values()]
    digest = hashlib.sha256(repr(facts).encode())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _settings(config: PretrainedConfig) -> list[tuple[str, object]]:
    return sorted((key, value) for key, value in config.to_dict().items() if key not in OF_A_COPY)


def _name(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"
