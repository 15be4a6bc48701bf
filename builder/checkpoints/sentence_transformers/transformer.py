"""Settings with which a sentence-transformers checkpoint loads its transformer and reads a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from builder.checkpoints.json_files import mapping_in, read_json
from builder.checkpoints.sentence_transformers.kinds import KINDS, MULTI_VECTOR, Kind
from builder.common.errors import CheckpointError

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
MULTI_VECTOR_KEYS = ("query_length", "document_length", "query_expansion")  # which late interaction has
RESERVED = (  # arguments of apply_chat_template that are not variables of the template
    "chat_template", "continue_final_message", "documents", "max_length", "padding", "restore_suffix", "return_dict",
    "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip
CHAT_FORMATS = ("auto", "flat", "structured")


@dataclass(frozen=True)
class ChatReading:
    """Put texts into messages of the chat template, with its further variables.

    `format`: a content is a text (flat) or a list of parts (structured); auto: as the template looks.
    """

    format: str
    variables: Mapping[str, Any]


def read_settings(transformer: Path, source: str, kind: Kind) -> dict[str, Any]:
    """Return the settings of the Transformer module in the folder `transformer`.

    Raises CheckpointError, which names `source`, for a setting that would change answers and is not implemented.
    """
    documents = (read_json(transformer / name, {}) for name in SETTINGS)
    settings: dict[str, Any] = next((settings for settings in documents if settings), {})
    unknown = [name for name in MULTI_VECTOR_KEYS if settings.get(name)]
    if unknown and kind is not KINDS[MULTI_VECTOR]:
        raise CheckpointError(f"{source} sets {', '.join(unknown)} for its transformer, which is not supported")
    _refuse_arguments(settings, source)
    _refuse_reading(settings, kind.head, kind.output, kind.reads_chats, source)
    read_chat(settings, source)
    return settings


def read_chat(settings: dict[str, Any], source: str) -> ChatReading | None:
    """Return how texts are put into the chat template; None if they are read as they are.

    Raises CheckpointError for a setting of that reading that would change answers and is not implemented.
    """
    message = mapping_in(settings, "modality_config", source).get("message")
    arguments = mapping_in(settings, "processing_kwargs", source)
    variables = mapping_in(arguments, "chat_template", source)
    wrong = [name for name in arguments if name != "chat_template"] + [name for name in variables if name in RESERVED]
    if wrong or (variables and message is None):
        raise CheckpointError(
            f"{source} sets {(wrong or ['chat_template'])[0]} in processing_kwargs of its transformer, which is not "
            "supported; known are variables of its chat template"
        )
    if message is None:
        return None
    form = message.get("format", "auto")
    if form not in CHAT_FORMATS:
        raise CheckpointError(f"{source} writes messages as {form!r}; known are {', '.join(CHAT_FORMATS)}")
    return ChatReading(form, variables)


def read_max_length(settings: dict[str, Any]) -> int | None:
    """Return the most tokens of a text that `settings` allow; None if they do not say."""
    processor = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}  # its name in earlier releases
    length: int | None = processor.get("model_max_length") or settings.get("max_seq_length")
    return length


def _refuse_arguments(settings: dict[str, Any], source: str) -> None:
    """Raise CheckpointError for an argument of its transformer or tokenizer that changes what is loaded."""
    for name, (older, harmless) in LOADING.items():
        arguments = mapping_in(settings, name, source) or mapping_in(settings, older, source)
        given = {key: value for key, value in arguments.items() if value is not None}
        wrong = sorted(set(given) - harmless - LOCATION_ARGUMENTS)
        if wrong:
            raise CheckpointError(
                f"{source} loads its transformer with {wrong[0]} {given[wrong[0]]!r} ({name}), which is not "
                "supported; write it into the configuration of the transformer or of its tokenizer"
            )


def _refuse_reading(settings: dict[str, Any], task: str, output: str, reads_chats: bool, source: str) -> None:
    """Raise CheckpointError if a text is not read by `task`'s forward, or another output of it is used.

    A transformer that reads messages of a chat too gets every text as one (base/modules/transformer.py, 6.2).
    """
    usual = {"method": "forward", "method_output_name": output}
    ways = mapping_in(settings, "modality_config", source) or {"text": usual}
    if "message" in ways and reads_chats:
        ways = {"text": mapping_in(ways, "message", source)}
    elif "message" in ways:
        raise CheckpointError(
            f"{source} puts texts into its chat template (a message in modality_config), which is not supported; "
            "remove message there if it was trained on texts as they are"
        )
    read = mapping_in(ways, "text", source)
    names = read.get("method_output_name")
    actual = settings.get("transformer_task") or task, read.get("method"), [names] if isinstance(names, str) else names
    if actual != (task, "forward", [output]):
        raise CheckpointError(
            f"{source} reads {actual[2]} of its transformer's {actual[1]} for texts, loaded for {actual[0]}; known "
            f"is {output} of forward, for {task}"
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
