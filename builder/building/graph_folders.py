"""Find the ONNX file that `--graph` names: a file, in a folder, or of a model of a Triton repository.

Reads the layouts that AITune's `aitune.triton.publish()` and Model Navigator write. Knows folders and config.pbtxt;
knows nothing about graphs.
"""

from __future__ import annotations

from pathlib import Path

from builder.common.errors import RepositoryError, SpecError
from builder.engines.onnxruntime import BACKEND
from builder.graphs.onnx.graph import MODEL_FILE
from builder.repository.config.render import CONFIG, parse

ONNX_BACKENDS = ("", BACKEND, "onnxruntime_onnx")  # a config.pbtxt without a backend leaves it to Triton
MAX_NAMES = 8


def graph_file(path: Path) -> Path:
    """Return the ONNX file of `path`, in the newest version of a Triton model. Raises SpecError."""
    if not path.exists():
        raise SpecError(f"--graph {path} cannot be read: there is no such file or folder")
    if path.is_file():
        return path
    if (path / MODEL_FILE).exists():
        return _in_version(path, MODEL_FILE, path)
    if _is_model(path):
        return _in_model(path)
    models = sorted(folder for folder in path.iterdir() if _is_model(folder))
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise SpecError(f"--graph {path} has several models: {names}; give the folder of one, such as {models[0]}")
    if not models:
        raise SpecError(
            f"--graph {path} has {_contents(path)}; expected an ONNX file, a folder with {MODEL_FILE}, or a model of a "
            f"Triton repository ({CONFIG} and 1/{MODEL_FILE})"
        )
    return _in_model(models[0])


def _is_model(folder: Path) -> bool:
    return folder.is_dir() and ((folder / CONFIG).is_file() or bool(_versions(folder)))


def _versions(model: Path) -> list[Path]:
    """Return the folders of a model's versions, the newest last."""
    folders = [folder for folder in model.iterdir() if folder.name.isdecimal() and folder.is_dir()]
    return sorted(folders, key=lambda folder: int(folder.name))


def _in_model(model: Path) -> Path:
    """Return the ONNX file of a Triton model's newest version. Raises SpecError."""
    config = model / CONFIG
    try:
        parsed = parse(config.read_text() if config.is_file() else "", model.name)
    except (RepositoryError, OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--graph {model} cannot be read: {error}") from error
    versions = _versions(model)
    if not versions:
        raise SpecError(f"--graph {model} has no version: expected a folder such as 1/ with {MODEL_FILE}")
    backend = parsed.backend or parsed.platform
    if backend not in ONNX_BACKENDS:
        raise SpecError(
            f"--graph {model} is a model of the backend {backend} ({_contents(versions[-1])}); only ONNX graphs are "
            "adopted: give the ONNX file that it was made from, or publish it for ONNX Runtime"
        )
    return _in_version(versions[-1], parsed.default_model_filename or MODEL_FILE, model)


def _in_version(version: Path, name: str, given: Path) -> Path:
    """Return the ONNX file `name`; Triton reads a folder of that name as model.onnx with its weights beside it.

    Raises SpecError.
    """
    if Path(name).name != name:
        raise SpecError(f"--graph {given}: default_model_filename is {name}; expected a name without folders")
    file = version / name / MODEL_FILE if (version / name).is_dir() else version / name
    if not file.is_file():
        raise SpecError(
            f"--graph {given} has no {file.relative_to(given)}, but {_contents(file.parent)}; only ONNX graphs are "
            "adopted, not TensorRT plans, TorchScript or PyTorch packages"
        )
    return file


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "") or "nothing"
