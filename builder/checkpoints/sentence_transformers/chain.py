"""Chain of modules that modules.json of a sentence-transformers checkpoint lists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from builder.checkpoints.json_files import read_json
from builder.common.errors import CheckpointError

PACKAGE = "sentence_transformers."  # of every module that this builder knows
PYLATE = {"pylate.models.Dense.Dense": "sentence_transformers.base.modules.dense.Dense"}  # by class of the same files
TRANSFORMERS = ("Transformer", "MLMTransformer")
TABLE = "StaticEmbedding"


@dataclass(frozen=True)
class ModuleFolder:
    """One module: the name of its class, such as Pooling, and the folder of its files."""

    name: str
    folder: Path


def read_chain(root: Path, known: tuple[str, ...]) -> list[ModuleFolder]:
    """Return the modules that modules.json in `root` lists; `known`: the names of classes that are read.

    A snapshot of the Hub links its files to a store beside it, so names of folders are judged and links not followed.
    Raises CheckpointError for code that comes with a checkpoint, and for a folder that is not in the checkpoint's own.
    """
    chain = []
    for index, module in enumerate(read_json(root / "modules.json", kind=list)):
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise CheckpointError(
                f"{root.name}: module {index} of modules.json is {str(module)[:100]}; expected a mapping with a type "
                "and a path, as sentence-transformers writes it"
            )
        chain.append(module_folder(root, PYLATE.get(kind, kind), path, known, str(module.get("idx"))))
    return chain


def module_folder(root: Path, kind: str, path: str, known: tuple[str, ...], place: str) -> ModuleFolder:
    """Return the module of class `kind` in `path` of `root`. Raises CheckpointError, which names its `place`."""
    name = kind.rsplit(".", 1)[-1]
    if not kind.startswith(PACKAGE) or name not in known:
        raise CheckpointError(
            f"{root.name} has a module {kind} at place {place}; known are these of "
            f"sentence_transformers: {', '.join(known)}"
        )
    if Path(path).is_absolute() or ".." in Path(path).parts or len(Path(path).parts) > 1:
        raise CheckpointError(f"{root.name} has a module at {path}; expected the name of a folder in its own")
    return ModuleFolder(name, root / path)
