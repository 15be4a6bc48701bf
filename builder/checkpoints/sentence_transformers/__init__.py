"""Read sentence-transformers folders: modules.json describes how token features become an answer.

Knows that format's files; what the modules compute is in builder/checkpoints/pooling.py and in the tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from builder.checkpoints.json_files import mapping_in, read_json
from builder.checkpoints.sentence_transformers.chain import TABLE, TRANSFORMERS, read_chain
from builder.checkpoints.sentence_transformers.kinds import (
    CROSS_ENCODER,
    EMBEDDER,
    KINDS,
    MULTI_VECTOR,
    STATIC,
    find_kind,
)
from builder.checkpoints.sentence_transformers.modules import READERS, Module, Normalize, Pooling, read_module
from builder.checkpoints.sentence_transformers.router import ROUTERS, Routes, read_router
from builder.checkpoints.sentence_transformers.transformer import ChatReading, read_chat, read_max_length, read_settings
from builder.checkpoints.static_embedding import is_model2vec
from builder.common.errors import CheckpointError

COLBERT = "HF_ColBERT"  # the class that Stanford's checkpoints name in config.json; they have no modules.json
PYLATE_KEYS = {"query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words"}
MODEL2VEC_LENGTH = 512  # tokens that model2vec reads of a text if config.json does not say (0.10, model.py)
M = TypeVar("M", bound=Module)


@dataclass(frozen=True)
class StaticTable:
    """Table of tokens' vectors in place of a transformer. `drops_unknown`: unknown tokens do not count in the mean."""

    drops_unknown: bool = False


@dataclass(frozen=True)
class SentenceModules:
    """Modules that a sentence-transformers folder adds to its transformer. `kind`: the class that saved it."""

    kind: str
    root: Path
    transformer: Path
    after: tuple[Module, ...]  # the modules after the transformer, in order
    dimensions: int | None  # of an embedding, where only its first ones are kept
    max_length: int | None
    lower_case: bool
    prompts: dict[str, str]
    default_prompt: str | None
    activation: str | None  # a cross-encoder's, as a dotted name
    chat: ChatReading | None = None  # None: texts are read as they are
    max_active_dims: int | None = None  # of a sparse embedding, where only its largest weights are kept
    routes: Routes | None = None  # of a sparse encoder that reads queries in another way than documents
    similarity: str | None = None  # of two embeddings: cosine, dot, euclidean or manhattan
    table: StaticTable | None = None  # what `transformer` holds, if it is not a transformer

    @property
    def pooling(self) -> Pooling | None:
        """Return the module that joins the vectors of a text's tokens, if there is one."""
        return next(iter(self.of(Pooling)), None)

    def of(self, kind: type[M]) -> list[M]:
        """Return the modules of one kind, in order."""
        return [module for module in self.after if isinstance(module, kind)]


def read_modules(root: Path) -> SentenceModules | None:
    """Read modules.json of `root`; None if there is none.

    Raises CheckpointError for a module or a setting this builder does not have: leaving one out would change answers.
    """
    general = read_json(root / "config_sentence_transformers.json", {})
    if is_model2vec(root):
        return _model2vec(root, general)
    if not (root / "modules.json").is_file():
        return _stanford_colbert(root)
    name = _kind_name(general)
    known, routes = (*TRANSFORMERS, TABLE, *READERS), None
    chain = read_chain(root, (*known, *ROUTERS))
    if chain and chain[0].name in ROUTERS:
        routes, documents = read_router(chain[0], root, name, known)
        chain = [*documents, *chain[1:]]
    kind = find_kind(name, chain, root.name)
    settings = read_settings(chain[0].folder, root.name, kind)
    prompts, default = _prompts(general, root.name)
    chat = read_chat(settings, root.name)
    if name == CROSS_ENCODER and default and chat is None:
        raise CheckpointError(f"{root.name} is a {CROSS_ENCODER} with a default prompt, which is not supported")
    after = tuple(read_module(module, root.name, kind.features) for module in chain[1:])
    return SentenceModules(
        kind=name,
        root=root,
        transformer=chain[0].folder,
        after=(Pooling(("mean",)), *after) if kind is STATIC else after,
        dimensions=general.get("truncate_dim"),
        max_length=read_max_length(settings),
        lower_case=bool(settings.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=default,
        activation=general.get("activation_fn"),
        chat=chat,
        max_active_dims=_max_active_dims(general, root.name),
        routes=routes,
        similarity=general.get("similarity_fn_name"),
        table=StaticTable() if kind is STATIC else None,
    )


def _max_active_dims(general: dict[str, Any], source: str) -> int | None:
    """Return how many weights of a sparse embedding are kept, None for all."""
    most = general.get("max_active_dims")
    if most is not None and not (isinstance(most, int) and most >= 1):
        raise CheckpointError(f"{source} has the max_active_dims {most!r}; expected a number of at least 1")
    return most


def _kind_name(general: dict[str, Any]) -> str:
    """Return the class that saved a checkpoint. pylate calls its own ColBERT, and its first releases did not say."""
    name = general.get("model_type") or (MULTI_VECTOR if PYLATE_KEYS & general.keys() else EMBEDDER)
    return MULTI_VECTOR if name == "ColBERT" else str(name)


def _stanford_colbert(root: Path) -> SentenceModules | None:
    """Return the modules of a checkpoint of Stanford's ColBERT, which sentence-transformers reads; None for others."""
    if COLBERT not in (read_json(root / "config.json", {}).get("architectures") or ()):
        return None
    settings = read_settings(root, root.name, KINDS[MULTI_VECTOR])
    return SentenceModules(MULTI_VECTOR, root, root, (), None, read_max_length(settings), False, {}, None, None)


def _model2vec(root: Path, general: dict[str, Any]) -> SentenceModules:
    """Return the modules of a checkpoint of model2vec, which its own config.json describes.

    Read as model2vec reads it: sentence-transformers, which loads it too, keeps unknown tokens.
    """
    config = read_json(root / "config.json")
    length = config.get("max_length", MODEL2VEC_LENGTH)
    if length is not None and not (isinstance(length, int) and length >= 1):
        raise CheckpointError(f"{root.name} has the max_length {length!r}; expected a number of at least 1, or null")
    prompts, default = _prompts(general, root.name)
    return SentenceModules(
        kind=EMBEDDER,
        root=root,
        transformer=root,
        after=(Pooling(("mean",)), *([Normalize()] if config.get("normalize") else [])),
        dimensions=general.get("truncate_dim"),
        max_length=length,
        lower_case=False,
        prompts=prompts,
        default_prompt=default,
        activation=None,
        similarity=general.get("similarity_fn_name"),
        table=StaticTable(drops_unknown=True),
    )


def _prompts(general: dict[str, Any], source: str) -> tuple[dict[str, str], str | None]:
    """Return prompts by name, none if all are empty, and the name of a text's default prompt."""
    prompts = {name: text or "" for name, text in mapping_in(general, "prompts", source).items()}
    default = general.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{source} has a default prompt {default!r}, which is not one of its prompts "
            f"({', '.join(prompts) or 'it has none'})"
        )
    return (prompts, default) if any(prompts.values()) else ({}, None)
