"""Cache of exports: a module that is traced again in the same way gets the earlier graph.

torch.export takes most of the time of a tiny build, and many tests build the same few checkpoints. Small graphs are
cached in the user's folder for the next run too, under a hash of the exporting code and of the libraries (code that
a graph does not depend on, as most of this project, may change); large ones in the folder of the run, for all of its
workers.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import onnx
import pytest
import torch
from transformers import PretrainedConfig

from builder.graphs.export.program import to_onnx
from builder.graphs.onnx.weights import computing, take_in
from tests.code_hash import PROJECT, digest_of

# Modules of builder/graphs/export whose code is in graphs.
TRACED = (
    "attention",
    "cached_attention",
    "caches",
    "sparse_experts",
    "complex_rotary",
    "experts",
    "latent",
    "lora",
    "masks",
    "rotary",
    "shared_prefixes",
    "states",
)
LIBRARIES = ("onnx", "onnxscript", "torch", "transformers")
SMALL = 8 << 20  # maximum bytes of a graph that is cached for the next run
STALE_S = 2 * 24 * 3600  # since a folder was last used
PLAIN = (str, int, float, bool, tuple, list, torch.dtype, type(None))
OF_A_COPY = {  # settings that differ after saving and loading; the dtype is covered by the tensors
    "_name_or_path",
    "_use_kernels",
    "_weight_conversions",
    "architectures",
    "dtype",
    "name_or_path",
    "transformers_version",
}


def user_folder() -> Path:
    """Return the folder of this code's graphs; delete folders of other code after two days without use."""
    code = [digest_of("builder.graphs.export.program", "to_onnx"), digest_of("builder.graphs.onnx.weights", "take_in")]
    code += [digest_of(f"builder.graphs.export.{name}") for name in TRACED]
    digest = hashlib.sha256(" ".join([sys.version, *map(version, LIBRARIES), *code]).encode())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "build-repo" / "exports"
    folder = home / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in home.iterdir():
        with suppress(FileNotFoundError):  # another run deleted it too
            if time.time() - other.stat().st_mtime > STALE_S:
                shutil.rmtree(other, ignore_errors=True)
    return folder


@contextmanager
def cached_exports(of_the_user: Path, of_the_run: Path) -> Iterator[None]:
    """Patch `to_onnx` everywhere in the package to read earlier exports from these folders."""
    of_the_run.mkdir(parents=True, exist_ok=True)

    def exported_once(
        module: torch.nn.Module,
        tensors: Sequence[torch.Tensor],
        dynamic_axes: Sequence[Mapping[int, Any]],
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> onnx.ModelProto:
        module.eval()
        name = f"{_key(module, tensors, dynamic_axes, inputs, outputs)}.onnx"
        with (of_the_run / f"{name}.lock").open("w") as lock:  # other workers that need the same export wait
            fcntl.flock(lock, fcntl.LOCK_EX)
            for folder in (of_the_run, of_the_user):
                if (folder / name).is_file():
                    return onnx.load(str(folder / name))
            with computing():
                model = to_onnx(module, tensors, dynamic_axes, inputs, outputs)
                take_in(model.graph)
            content = model.SerializeToString()
            folder = of_the_user if len(content) < SMALL else of_the_run
            written = folder / f"{name}.{os.getpid()}"
            written.write_bytes(content)
            written.rename(folder / name)  # atomic, because another run may read it
            return onnx.load_from_string(content)

    with pytest.MonkeyPatch.context() as patch:
        for name, owner in list(sys.modules.items()):
            if name.startswith("builder.") and getattr(owner, "to_onnx", None) is to_onnx:
                patch.setattr(owner, "to_onnx", exported_once)
        yield


def _key(module: torch.nn.Module, tensors: Sequence[torch.Tensor], *signature: object) -> str:
    """Return a hash of all that an export depends on: code by names, settings and weights by values."""
    facts: list[object] = [signature, [(t.dtype, tuple(t.shape), t.tolist()) for t in tensors]]
    configs: dict[int, Any] = {}
    for name, part in module.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        facts.append((name, *map(_code, (type(part), part.forward, *hooks, *_methods_of_ours(type(part))))))
        for key, value in sorted(vars(part).items()):
            if isinstance(value, PretrainedConfig):
                configs[id(value)] = value
            elif isinstance(value, PLAIN) and key not in OF_A_COPY:
                facts.append((key, value))
            elif isinstance(value, FunctionType):
                facts.append((key, _code(value)))
            elif not key.startswith("_") and isinstance(value, dict):
                codes = {name: _code(one) for name, one in value.items() if isinstance(one, FunctionType)}
                facts.append((key, repr({**value, **codes})))
            elif not key.startswith("_") and type(part).__module__.startswith("builder."):
                facts.append((key, repr(value)))
    for owner in sorted({type(part).__module__ for part in module.modules()}):  # its functions may be replaced
        functions = {key: code for key, code in vars(sys.modules[owner]).items() if isinstance(code, FunctionType)}
        ours = owner.startswith(PROJECT)  # the hashes of its classes cover the functions that they need
        facts.append([(key, _name(code) if ours else _code(code)) for key, code in sorted(functions.items())])
    for name in TRACED:  # what they name may be replaced too
        names = vars(importlib.import_module(f"builder.graphs.export.{name}"))
        hashes = {key: _code(value) for key, value in names.items() if isinstance(value, FunctionType)}
        constants = {key: value for key, value in names.items() if key.isupper() and isinstance(value, PLAIN)}
        facts.append((name, sorted(hashes.items()), sorted(constants.items())))
    facts += [(config._attn_implementation, _settings(config)) for config in configs.values()]
    digest = hashlib.sha256(repr(facts).encode())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _settings(config: PretrainedConfig) -> list[tuple[str, object]]:
    return sorted((key, value) for key, value in config.to_dict().items() if key not in OF_A_COPY)


def _methods_of_ours(kind: type) -> list[FunctionType]:
    """Return the methods of a class and its bases that this project has added."""
    methods = [method for one in kind.__mro__ for _, method in sorted(vars(one).items())]
    return [method for method in methods if isinstance(method, FunctionType) and _is_ours(method)]


def _name(code: Any) -> str:
    """Return the name of a class or a function."""
    return f"{code.__module__}.{code.__qualname__}"


def _code(code: Any, above: tuple[object, ...] = ()) -> str:
    """Return the name of a class or a function, and the behaviour of one that belongs to this project.

    It includes the values in a function's closure and defaults, which its definition does not name. `above`: the
    functions that have this one among their values.
    """
    text = _name(code) + (_definition(code) if _is_ours(code) else "")
    return text + "".join(_value(value, (*above, code)) for value in _held(code))


def _definition(code: Any) -> str:
    """Return a hash of a definition; of a lambda, which its name does not tell from others, of its code too."""
    names = code.__qualname__.split(".")
    digest = digest_of(code.__module__, names[0])
    if names[-1] != "<lambda>":
        return digest
    return repr((digest, _compiled(code.__code__, code.__module__)))


def _compiled(code: CodeType, module: str) -> tuple[object, ...]:
    """Return the operations, constants and names of compiled code, and hashes of the definitions that it reaches.

    A constant that is code itself has an address, which differs between processes.
    """
    constants = [_compiled(value, module) if isinstance(value, CodeType) else value for value in code.co_consts]
    return code.co_code, constants, code.co_names, [digest_of(module, name) for name in code.co_names]


def _value(value: object, above: tuple[object, ...]) -> str:
    if isinstance(value, FunctionType | MethodType | type):
        return f" of ({_code(value, above) if value not in above else _name(value)})"
    return f" of {value!r}" if isinstance(value, PLAIN) else ""


def _held(code: Any) -> Iterator[object]:
    """Yield the values of a function's closure and its defaults, as far as they are filled."""
    for cell in getattr(code, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from getattr(code, "__defaults__", None) or ()
    yield from (getattr(code, "__kwdefaults__", None) or {}).values()


def _is_ours(code: Any) -> bool:
    return (code.__module__ or "").startswith(PROJECT)
