"""Router of a sparse encoder: queries weighed by a table of tokens, documents by a transformer.

Source: sentence-transformers 6.2, base/modules/router.py, and sparse_encoder/modules/sparse_static_embedding.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.checkpoints.json_files import mapping_in, read_json
from builder.checkpoints.sentence_transformers.chain import ModuleFolder, module_folder
from builder.checkpoints.sentence_transformers.kinds import SPARSE_ENCODER
from builder.common.errors import CheckpointError

ROUTERS = ("Router", "Asym")  # the second is its earlier name
TABLE = "SparseStaticEmbedding"
SETTINGS = "router_config.json"
INPUT_TYPES = ("query", "document")


@dataclass(frozen=True)
class Routes:
    """Folder with the weights of a query's tokens, and the route of a text that names none, if it has one."""

    query: Path
    default: str | None


def read_router(
    router: ModuleFolder, root: Path, kind: str, known: tuple[str, ...]
) -> tuple[Routes, list[ModuleFolder]]:
    """Return the routes of `router`, and the chain of modules of its documents.

    `kind`: the class that saved the checkpoint; `known`: the names of classes that are read. Raises CheckpointError.
    """
    if kind != SPARSE_ENCODER:
        raise CheckpointError(
            f"{root.name} is a {kind} with a {router.name}, which is supported for a {SPARSE_ENCODER} alone; save each "
            f"route as a {kind} of its own, and build those"
        )
    if router.folder != root:
        raise CheckpointError(f"{root.name} has its {router.name} in {router.folder.name}; expected it at the top")
    config = read_json(root / SETTINGS)
    types, structure = mapping_in(config, "types", root.name), mapping_in(config, "structure", root.name)
    chains = {route: _chain(root, names, types, (*known, TABLE)) for route, names in structure.items()}
    if set(chains) != set(INPUT_TYPES) or [module.name for module in chains["query"]] != [TABLE]:
        found = "; ".join(f"{route}: {', '.join(module.name for module in chain)}" for route, chain in chains.items())
        raise CheckpointError(
            f"{root.name} has the routes {found or 'none'}; expected query: {TABLE}, and document: a transformer and "
            "SpladePooling"
        )
    parameters = mapping_in(config, "parameters", root.name)
    if parameters.get("route_mappings"):
        raise CheckpointError(f"{root.name} has route_mappings in {SETTINGS}, which are not supported; remove them")
    return Routes(_table(chains["query"][0].folder), _default(parameters, tuple(structure))), chains["document"]


def _chain(root: Path, names: Any, types: Mapping[str, Any], known: tuple[str, ...]) -> list[ModuleFolder]:
    if not isinstance(names, list) or not all(isinstance(types.get(name), str) for name in map(str, names)):
        raise CheckpointError(f"{root.name}: a route of {SETTINGS} is {str(names)[:100]}; expected names of its types")
    return [module_folder(root, types[name], name, known, f"{name!r} of {SETTINGS}") for name in map(str, names)]


def _table(folder: Path) -> Path:
    """Refuse a table that would be downloaded as JSON, or read by pickle."""
    if read_json(folder / "config.json", {}).get("path") or not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            f"{folder.name} has no model.safetensors with the weights of its tokens; load it with "
            "sentence-transformers and save it again: SparseEncoder(...).save_pretrained(folder)"
        )
    return folder


def _default(parameters: Mapping[str, Any], routes: tuple[str, ...]) -> str | None:
    """Return the route of a text that names none; without a default, Router takes its first one if it may."""
    default = parameters.get("default_route")
    if default is None:
        return routes[0] if parameters.get("allow_empty_key", True) else None
    if default not in INPUT_TYPES:
        raise CheckpointError(f"{SETTINGS} has the default_route {default!r}; expected query or document")
    return str(default)
