"""From the user's model name to local files that can be trusted: configuration, tokeniser, weights, task.

Knows Hub ids, folders and safetensors; knows nothing about graphs or Triton.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from builder.checkpoints.card import read_card
from builder.checkpoints.configuration import read_configuration
from builder.checkpoints.fetch import fetch
from builder.checkpoints.generation_config import FILE, generation_file
from builder.checkpoints.grids import Grids
from builder.checkpoints.packed import packed_format, refuse_packed, unpack, without_quantisation
from builder.checkpoints.sentence_transformers import SentenceModules, read_in_lower_case, read_modules
from builder.checkpoints.slow_tokenizers import as_fast
from builder.checkpoints.tasks import Task, find_task, infer_task
from builder.checkpoints.tokenizer_limits import panics_refused, refuse_hostile_files, refuse_hostile_tokenizer
from builder.checkpoints.untrusted import refuse_contents, refuse_files
from builder.checkpoints.weight_files import refuse_damaged, weight_files
from builder.checkpoints.widen import widened
from builder.common.cache.digests import digest_of
from builder.common.errors import BuilderError, CheckpointError, first_line
from builder.options import BuildSpec, Source
from builder.runtime.panics import survived

POSITION_TABLES = ("position_embeddings", "embed_positions", "wpe")
# Of encoder-decoders, what has features of a text alone; sentence-transformers takes the same (its
# base/modules/transformer.py, 6.2). The auto class has models that want the tokens of an answer too.
ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


@dataclass(frozen=True)
class CheckpointFiles:
    """Checkpoint on disk. `weights_sha256` identifies the weights; None where a commit of the Hub does.

    `card`: what its card says of its origin.
    """

    source: str
    revision: str | None
    folder: Path
    weights: tuple[Path, ...]
    weights_sha256: str | None
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast
    task: Task
    sentence: SentenceModules | None
    card: Mapping[str, list[str]]

    def identity(self) -> dict[str, Any]:
        """Return the checkpoint's identity for build.json."""
        return {
            "source": self.source,
            "revision": self.revision,
            "model_type": self.config.model_type,
            "weights_sha256": self.weights_sha256,
        }


@dataclass(frozen=True)
class Checkpoint(CheckpointFiles):
    """Checkpoint with its model, in fp32: all that exporting it needs.

    `pooling`: the user's pooling of token vectors, if it replaces the checkpoint's own. `grids`: those of its matrices,
    if they are stored in 4 or 8 bits.
    """

    model: PreTrainedModel
    max_length: int
    pooling: str | None = None
    grids: Grids | None = None


def locate(source: Source, weights: bool = True) -> CheckpointFiles:
    """Find and check the requested checkpoint. Raises CheckpointError.

    Without `weights`, those of a Hub id are not downloaded.
    """
    root, revision = fetch(source.model, source.revision, weights)
    refuse_files(root, source.model)
    sentence = read_modules(root)
    folder = sentence.transformer if sentence is not None else root
    refuse_contents(folder, source.model)
    _refuse_adapter(folder, source.model)
    files = weight_files(folder, source.model) if weights or revision is None else []
    config = read_configuration(folder, source.model)
    with panics_refused(source.model):
        tokenizer = _tokenizer(folder, source.model, config)
    if sentence is not None and sentence.lower_case:
        read_in_lower_case(tokenizer)
    refuse_damaged(files, source.model)
    return CheckpointFiles(
        source=source.model.rstrip("/") if revision else root.resolve().name,
        revision=revision,
        folder=folder,
        weights=tuple(files),
        weights_sha256=digest_of(files) if files else None,
        config=config,
        tokenizer=tokenizer,
        task=find_task(source.task) if source.task else infer_task(config, sentence.kind if sentence else None),
        sentence=sentence,
        card=read_card(root),
    )


def resolve(spec: BuildSpec) -> Checkpoint:
    """Find, check and load the checkpoint of `spec`. Raises CheckpointError, and RepositoryError for a full disk."""
    files = locate(spec.source)
    model, grids = load_model(files)
    if grids is not None:
        refuse_packed(spec.precision, spec.model_fields_set, grids)
    _drop_inputs(files.tokenizer, model)
    return replace(_checkpoint(spec.source, files, model), grids=grids)


def describe(source: Source) -> Checkpoint:
    """Load the same with a model whose tensors have shapes and no memory: no weight is read.

    Raises CheckpointError.
    """
    files = locate(source, weights=False)
    try:
        with torch.device("meta"):
            model = _from_config(_model_class(files.task, files.config), without_quantisation(files.config))
        _read_generation_config(model, files.folder)
    except Exception as error:  # transformers raises any kind for a broken checkpoint
        raise CheckpointError(
            f"{source.model} is not a checkpoint for {files.task.name}: {first_line(error)}"
        ) from error
    return _checkpoint(source, files, model.eval())


def _checkpoint(source: Source, files: CheckpointFiles, model: PreTrainedModel) -> Checkpoint:
    longest = _max_length(source.max_length, files.tokenizer, model, files.sentence, files.task.longest)
    if longest is None:
        raise CheckpointError(f"{source.model} does not say how long a text may be; set the limit with --max-length")
    return Checkpoint(**vars(files), model=model, max_length=longest, pooling=source.pooling)


def _drop_inputs(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> None:
    """Drop the tokeniser's outputs that the model does not take.

    BERT's tokeniser makes token types, beside a DistilBERT too, whose forward would refuse them.
    """
    taken = inspect.signature(model.forward).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name in taken]


def load_model(files: CheckpointFiles) -> tuple[PreTrainedModel, Grids | None]:
    """Load the task's model class in fp32, every weight of it from the checkpoint, and the grids of its matrices.

    Raises CheckpointError, and RepositoryError for a full disk.
    """
    task, config = files.task, files.config
    kind = _model_class(task, config)
    packed = packed_format(config, files.source)
    grids = None
    try:
        if packed is None:
            with widened(files.folder, files.weights) as folder:
                model, info = kind.from_pretrained(folder, **_loading(config), use_safetensors=True)
        else:
            config = without_quantisation(config)
            with torch.device("meta"):
                shapes = _from_config(kind, config)
            weights, grids = unpack(packed, files.weights, shapes)
            model, info = shapes.__class__.from_pretrained(None, **_loading(config), state_dict=weights)
            _read_generation_config(model, files.folder)
    except BuilderError:
        raise
    except Exception as error:  # transformers raises any kind for a broken checkpoint
        raise CheckpointError(
            f"the checkpoint does not load for {task.name}: {first_line(error)[:300]}. Its weights, its config.json "
            "(id2label too) and the task must belong together"
        ) from error
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(task.unused_weights))
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    if missing or mismatched:
        have = ", ".join(config.architectures or ["unknown"])
        raise CheckpointError(
            f"the checkpoint ({have}) has no head for {task.name}: {len(missing) + len(mismatched)} weights would "
            f"be random, such as {(missing + mismatched)[0]}. Choose a task it was trained for with --task"
        )
    return model.eval(), grids


def _model_class(task: Task, config: PreTrainedConfig) -> Any:
    """Return transformers' auto class for the head of `task`, or the class of an encoder alone."""
    name = ENCODERS.get(config.model_type) if task.head == "feature-extraction" else None
    return task.auto_class() if name is None else getattr(transformers, name)


def _from_config(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of `kind`, a class or an auto class, with weights of its own."""
    model: PreTrainedModel = getattr(kind, "from_config", kind)(config)
    return model


def _loading(config: PreTrainedConfig) -> dict[str, Any]:
    return {"config": config, "dtype": torch.float32, "output_loading_info": True}


def _read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Read the generation settings as `from_pretrained` does; old checkpoints have them in their config.json."""
    if model.can_generate():
        file = generation_file(folder)
        named: dict[str, Any] = {} if file == FILE else {"config_file_name": file, "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(folder, **named)


def _refuse_adapter(folder: Path, model: str) -> None:
    """Raise CheckpointError for an adapter.

    With peft transformers answers with the adapter, and without peft with the weights beside it.
    """
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{model} has an adapter (adapter_config.json), whose weights are not in its model's; merge them first: "
            "PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(folder)"
        )


def _tokenizer(folder: Path, model: str, config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    names = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model")
    if not any((folder / name).is_file() for name in names):
        raise CheckpointError(f"{model} has no tokenizer: none of {', '.join(names)} is in {folder}; add it there")
    refuse_hostile_files(folder, model)
    try:
        tokenizer = survived(AutoTokenizer.from_pretrained, folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises any kind for a broken file
        raise CheckpointError(f"the tokenizer of {model} does not load: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        try:
            tokenizer = as_fast(tokenizer)
        except CheckpointError as error:
            raise CheckpointError(f"{model}: {error}") from error
    if tokenizer.split_special_tokens:
        raise CheckpointError(
            f"the tokenizer of {model} says split_special_tokens: special tokens in a text would be text, which is not "
            "supported; set it to false in tokenizer_config.json to serve the model without"
        )
    refuse_hostile_tokenizer(tokenizer, folder, model)
    rows = getattr(config, "vocab_size", None)
    highest = _highest_token(tokenizer)
    if rows is not None and highest >= rows:
        raise CheckpointError(
            f"the tokenizer of {model} has tokens up to {highest} and the model only {rows} embeddings: "
            "they do not belong together"
        )
    typed: PreTrainedTokenizerFast = tokenizer
    return typed


def _highest_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the highest token id of its vocabulary, and of the tokens that it puts around texts."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # to a length that happened to be set
    backend.no_truncation()
    around = survived(backend.encode, "a", "b").ids
    return max(len(tokenizer) - 1, *tokenizer.get_vocab().values(), *around, 0)


def _max_length(
    stated: int | None,
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    sentence: SentenceModules | None,
    longest: int | None,
) -> int | None:
    """Return the most tokens of one row: the user's, the checkpoint's, the task's or the positions' limit; or None.

    What sentence-transformers saved comes before what the tokeniser says, as it does there.
    """
    positions = position_limit(model)
    own = tokenizer.model_max_length if tokenizer.model_max_length < 10**6 else None
    if sentence is not None and sentence.max_length:
        own = sentence.max_length
    if stated is not None:
        if positions is not None and stated > positions:
            raise CheckpointError(
                f"--max-length {stated} exceeds the {positions} positions this model has; use at most that"
            )
        return stated
    return min((limit for limit in (positions, own, longest) if limit), default=None)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many tokens the learned position tables of `model` hold; None if it has none.

    A table with a padding index starts counting after it, as RoBERTa's does. Some are not torch's own embedding:
    I-BERT's is a class that can be quantised.
    """
    limits = [
        int(module.weight.shape[0]) - (0 if module.padding_idx is None else int(module.padding_idx) + 1)  # type: ignore[arg-type]
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in POSITION_TABLES and hasattr(module, "weight") and hasattr(module, "padding_idx")
    ]
    declared: Any = getattr(model.config, "max_position_embeddings", None)
    if declared and declared > 0:  # further rows of a table may have another meaning
        limits.append(int(declared))
    return min(limits, default=None)


def tokenizer_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the tokeniser as one file, without the padding and truncation that happened to be set on it."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["padding"] = document["truncation"] = None
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
