"""Read sentence-transformers folders: modules.json describes how token features become one embedding.

Knows that format's files; what the modules compute is in builder/checkpoints/pooling.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from builder.common.errors import CheckpointError
from builder.runtime.fields import JSON_TYPES

MODULES = "sentence_transformers."  # the package of every module that this builder knows
POOLING_KEYS = {  # in the order in which sentence-transformers concatenates them
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_NAMES = {"mean_sqrt_len_tokens": "mean_sqrt_len"}  # a newer config.json's names that differ from ours
MODULE_NAMES = ("Transformer", "Pooling", "Dense", "Normalize", "MLMTransformer", "SpladePooling")
SETTINGS = (  # the file of a Transformer module's settings, in the order in which sentence-transformers looks
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
LOADING = {  # settings for loading a transformer: earlier name, and the arguments that change no answer
    "model_kwargs": (
        "model_args",
        {
            "add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype",
            "use_safetensors",
        },
    ),
    "processor_kwargs": (
        "tokenizer_args",
        {"clean_up_tokenization_spaces", "model_max_length", "padding_side", "use_fast"},
    ),
    "config_kwargs": ("config_args", {"use_cache"}),
}  # fmt: skip
LOCATION_ARGUMENTS = {"trust_remote_code", "cache_dir", "token", "revision", "subfolder", "local_files_only"}
UNSUPPORTED_SETTINGS = ("query_length", "document_length", "query_expansion", "processing_kwargs")  # of those settings
EMBEDDER, CROSS_ENCODER, SPARSE_ENCODER = "SentenceTransformer", "CrossEncoder", "SparseEncoder"
HEADS = {  # by class: the task of the transformer's head, and the output that is read
    EMBEDDER: ("feature-extraction", "last_hidden_state"),
    CROSS_ENCODER: ("sequence-classification", "logits"),
    SPARSE_ENCODER: ("fill-mask", "logits"),
}
CHAINS = {
    EMBEDDER: re.compile("Transformer Pooling( Dense)*( Normalize)*"),
    CROSS_ENCODER: re.compile("Transformer"),
    SPARSE_ENCODER: re.compile("(MLM)?Transformer SpladePooling"),
}


@dataclass(frozen=True)
class SentenceModules:
    """Modules that a sentence-transformers folder adds to its transformer. `kind`: the class that saved it."""

    kind: str
    transformer: Path
    pooling: tuple[str, ...]
    dense: tuple[Path, ...]
    normalize: bool
    dimensions: int | None  # of an embedding, where only its first ones are kept
    max_length: int | None
    lower_case: bool
    prompts: dict[str, str]
    default_prompt: str | None
    activation: str | None  # a cross-encoder's, as a dotted name


def read_modules(root: Path) -> SentenceModules | None:
    """Read modules.json of `root`; None if there is none.

    Raises CheckpointError for a module or a setting this builder does not have: leaving one out would change answers.
    """
    if not (root / "modules.json").is_file():
        return None
    general = read_json(root / "config_sentence_transformers.json", {})
    kind = general.get("model_type", EMBEDDER)
    chain = _chain(root)
    if kind not in CHAINS or not CHAINS[kind].fullmatch(" ".join(name for name, _ in chain)):
        raise CheckpointError(
            f"{root.name} is a {kind} of {', '.join(name for name, _ in chain)}; known are a {EMBEDDER} of "
            f"Transformer, Pooling, then perhaps Dense and Normalize, a {CROSS_ENCODER} of a Transformer alone, and a "
            f"{SPARSE_ENCODER} of MLMTransformer and SpladePooling"
        )
    (_, transformer), *after = chain
    settings = _settings(transformer, root, kind)
    pooling: tuple[str, ...] = ()
    for name, folder in after:
        if name == "Pooling":
            pooling = _pooling(read_json(folder / "config.json"), root)
        elif name == "SpladePooling":
            _refuse_splade(read_json(folder / "config.json"), general, root)
        elif name == "Normalize":
            config = read_json(folder / "config.json", {})
            for key in ("module_input_name", "module_output_name"):
                if (config.get(key) or "sentence_embedding") != "sentence_embedding":
                    raise CheckpointError(f"{root.name} normalises {config[key]}, which is not supported")
    prompts, default = _prompts(general, root)
    processor = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}  # its name in earlier releases
    if kind == CROSS_ENCODER and default:
        raise CheckpointError(f"{root.name} is a {CROSS_ENCODER} with a default prompt, which is not supported")
    return SentenceModules(
        kind=kind,
        transformer=transformer,
        pooling=pooling,
        dense=tuple(folder for name, folder in after if name == "Dense"),
        normalize=any(name == "Normalize" for name, _ in after),
        dimensions=general.get("truncate_dim"),
        max_length=processor.get("model_max_length") or settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=default,
        activation=general.get("activation_fn"),
    )


def read_in_lower_case(tokenizer: PreTrainedTokenizerFast) -> None:
    """Let `tokenizer` make texts lower-case before anything else, except special tokens in them.

    As sentence-transformers does where its settings say do_lower_case (base/modules/transformer.py, 6.2).
    """
    backend = tokenizer.backend_tokenizer
    own: Any = backend.normalizer
    several = isinstance(own, normalizers.Sequence)
    parts: list[Any] = list(own) if several else [] if own is None else [own]
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


def _chain(root: Path) -> list[tuple[str, Path]]:
    """Return the class name, such as Pooling, and the folder of each module in modules.json.

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
        name = kind.rsplit(".", 1)[-1]
        if not kind.startswith(MODULES) or name not in MODULE_NAMES:
            raise CheckpointError(
                f"{root.name} has a module {kind} at place {module.get('idx')}; known, in this order, are "
                "Transformer, Pooling, Dense and Normalize of sentence_transformers, or MLMTransformer and "
                "SpladePooling"
            )
        if Path(path).is_absolute() or ".." in Path(path).parts or len(Path(path).parts) > 1:
            raise CheckpointError(f"{root.name} has a module at {path}; expected the name of a folder in its own")
        chain.append((name, root / path))
    return chain


def _settings(transformer: Path, root: Path, kind: str) -> dict[str, Any]:
    documents = (read_json(transformer / name, {}) for name in SETTINGS)
    settings: dict[str, Any] = next((settings for settings in documents if settings), {})
    unknown = [name for name in UNSUPPORTED_SETTINGS if settings.get(name)]
    if unknown:
        raise CheckpointError(f"{root.name} sets {', '.join(unknown)} for its transformer, which is not supported")
    _refuse_arguments(settings, root)
    _refuse_reading(settings, *HEADS[kind], root)
    return settings


def _refuse_arguments(settings: dict[str, Any], root: Path) -> None:
    """Raise CheckpointError for an argument of its transformer or tokenizer that changes what is loaded."""
    for name, (older, harmless) in LOADING.items():
        arguments = _mapping(settings, name, root) or _mapping(settings, older, root)
        given = {key: value for key, value in arguments.items() if value is not None}
        wrong = sorted(set(given) - harmless - LOCATION_ARGUMENTS)
        if wrong:
            raise CheckpointError(
                f"{root.name} loads its transformer with {wrong[0]} {given[wrong[0]]!r} ({name}), which is not "
                "supported; write it into the configuration of the transformer or of its tokenizer"
            )


def _refuse_reading(settings: dict[str, Any], task: str, output: str, root: Path) -> None:
    """Raise CheckpointError if a text is not read by `task`'s forward, or another output of it is used.

    A transformer that reads messages of a chat too gets every text as one (base/modules/transformer.py, 6.2).
    """
    usual = {"method": "forward", "method_output_name": output}
    ways = _mapping(settings, "modality_config", root) or {"text": usual}
    if "message" in ways:
        raise CheckpointError(
            f"{root.name} puts texts into its chat template (a message in modality_config), which is not supported; "
            "remove message there if it was trained on texts as they are"
        )
    read = _mapping(ways, "text", root)
    names = read.get("method_output_name")
    actual = settings.get("transformer_task") or task, read.get("method"), [names] if isinstance(names, str) else names
    if actual != (task, "forward", [output]):
        raise CheckpointError(
            f"{root.name} reads {actual[2]} of its transformer's {actual[1]} for texts, loaded for {actual[0]}; known "
            f"is {output} of forward, for {task}"
        )


def _mapping(settings: dict[str, Any], name: str, root: Path) -> dict[str, Any]:
    """Return the value of `name` in `settings`, empty if there is none.

    Raises CheckpointError unless it is a mapping.
    """
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{root.name}: its setting {name} is {str(value)[:100]!r}; expected a mapping")
    return value


def _prompts(general: dict[str, Any], root: Path) -> tuple[dict[str, str], str | None]:
    """Return prompts by name, none if all are empty, and the name of a text's default prompt."""
    prompts = {name: text or "" for name, text in _mapping(general, "prompts", root).items()}
    default = general.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{root.name} has a default prompt {default!r}, which is not one of its prompts "
            f"({', '.join(prompts) or 'it has none'})"
        )
    return (prompts, default) if any(prompts.values()) else ({}, None)


def _pooling(config: dict[str, Any], root: Path) -> tuple[str, ...]:
    if not config.get("include_prompt", True):
        raise CheckpointError(f"{root.name} pools without its prompt (include_prompt: false), which is not supported")
    if mode := config.get("pooling_mode"):
        return tuple(POOLING_NAMES.get(name, name) for name in ([mode] if isinstance(mode, str) else mode))
    return tuple(mode for key, mode in POOLING_KEYS.items() if config.get(key)) or ("mean",)


def _refuse_splade(config: dict[str, Any], general: dict[str, Any], root: Path) -> None:
    """Raise CheckpointError for a pooling of logits other than the largest log(1 + relu) of each token, over all."""
    if general.get("max_active_dims") is not None:
        raise CheckpointError(
            f"{root.name} keeps the largest {general['max_active_dims']} of an embedding (max_active_dims), which is "
            "not supported; remove it from config_sentence_transformers.json to get all"
        )
    merged = {"pooling_strategy": "max", "activation_function": "relu", **config}
    for name, supported in (("pooling_strategy", "max"), ("activation_function", "relu")):
        if merged[name] != supported:
            raise CheckpointError(
                f"{root.name} has a {name} {merged[name]!r} of its SpladePooling; known is {supported}"
            )


def read_json(path: Path, default: Any = None, kind: type = dict) -> Any:
    """Return the JSON value of type `kind` in a file, or `default` if there is no file.

    Raises CheckpointError.
    """
    if default is not None and not path.is_file():
        return default
    try:
        value = json.loads(path.read_text("utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} has the JSON type {JSON_TYPES[type(value)]}; expected {JSON_TYPES[kind]}")
    return value
