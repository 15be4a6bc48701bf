"""Find, check and load a checkpoint: from a Hub id or a folder to configuration, tokenizer, task and model."""

from __future__ import annotations

import inspect
from dataclasses import replace

from transformers import PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint, CheckpointFiles
from builder.checkpoints.fetch import fetch, read_card, refuse_damaged, source_name, weight_files
from builder.checkpoints.gliner.settings import read_settings as read_gliner
from builder.checkpoints.gliner2.settings import read_settings as read_gliner2
from builder.checkpoints.late_interaction import load_late_interaction
from builder.checkpoints.model import (
    check_configuration,
    load_model,
    model_without_weights,
    position_limit,
    read_configuration,
)
from builder.checkpoints.packed import packed_format, refuse_packed, stored_weights
from builder.checkpoints.sentence_transformers import read_modules
from builder.checkpoints.sentence_transformers.kinds import MULTI_VECTOR
from builder.checkpoints.sentence_transformers.transformer import read_in_lower_case
from builder.checkpoints.static_embedding import read_static_config, read_tokenizer
from builder.checkpoints.tasks import find_task, infer_task
from builder.checkpoints.tokenizer import load_any, load_tokenizer
from builder.checkpoints.tokenizer_limits import panics_refused
from builder.checkpoints.untrusted import refuse_contents, refuse_files
from builder.common.errors import CheckpointError, first_line
from builder.common.hashing import digest_of
from builder.options import BuildSpec, Source

NO_LIMIT = 10**6  # tokens; a tokenizer without a limit has VERY_LARGE_INTEGER


def locate(source: Source, weights: bool = True) -> CheckpointFiles:
    """Find and check the requested checkpoint. Raises CheckpointError.

    Without `weights`, those of a Hub id are not downloaded.
    """
    root, revision = fetch(source.model, source.revision, weights)
    refuse_files(root, source.model)
    sentence = read_modules(root)
    folder = sentence.transformer if sentence is not None else root
    refuse_contents(folder, source.model)
    if (folder / "adapter_config.json").is_file():  # transformers uses it only if peft is installed
        raise CheckpointError(
            f"{source.model} has an adapter (adapter_config.json), whose weights are not in its model's; merge them "
            "first: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(folder)"
        )
    gliner = read_gliner(folder, source.model, weights or revision is None) or read_gliner2(folder, source.model)
    files = weight_files(folder, source.model) if weights or revision is None else []
    is_table = sentence is not None and sentence.table is not None
    if gliner is not None:
        config = check_configuration(gliner.encoder_config(source.model), source.model)
    else:
        config = (read_static_config if is_table else read_configuration)(folder, source.model)
    with panics_refused(source.model):
        tokenizer = load_tokenizer(folder, source.model, config, read_tokenizer if is_table else load_any)
    if sentence is not None and sentence.lower_case:
        read_in_lower_case(tokenizer)
    refuse_damaged(files, source.model)
    saved_by = gliner.library if gliner is not None else sentence.kind if sentence is not None else None
    task = find_task(source.task) if source.task else infer_task(config, saved_by)
    if gliner is not None and not task.claims(config, saved_by):
        raise CheckpointError(
            f"{source.model} is a checkpoint of {gliner.library} and cannot be served for {task.name}; leave --task out"
        )
    headless = source.adapter_labels is not None and not task.has_head(config)
    if headless:
        config.num_labels = source.adapter_labels
    found = CheckpointFiles(
        source=source_name(source.model, revision),
        revision=revision,
        folder=folder,
        weights=tuple(files),
        weights_sha256=digest_of(files) if files else None,
        config=config,
        tokenizer=tokenizer,
        task=task,
        sentence=sentence,
        gliner=gliner,
        card=read_card(root),
        headless=headless,
    )
    return found.task.prepare(found)


def resolve(spec: BuildSpec) -> Checkpoint:
    """Find, check and load the checkpoint of `spec`. Raises CheckpointError, and RepositoryError for a full disk."""
    files = locate(spec.source)
    model, grids = load_model(files)
    if grids is not None:
        refuse_packed(spec.precision, spec.model_fields_set, grids)
    encoder = None
    if files.sentence is not None and files.sentence.kind == MULTI_VECTOR:
        files, encoder = load_late_interaction(files, model)
    accepted = inspect.signature(model.forward).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        # BERT's tokenizer returns token types for a DistilBERT too, whose forward refuses them
        names = files.tokenizer.model_input_names
        files.tokenizer.model_input_names = [name for name in names if name in accepted]
    return replace(_checkpoint(spec.source, files, model), grids=grids, late_interaction=encoder)


def describe(source: Source) -> Checkpoint:
    """Find and check a checkpoint, with a model on the meta device: no weight is read. Raises CheckpointError."""
    files = locate(source, weights=False)
    packed = packed_format(files.config, source.model)
    try:
        model = model_without_weights(files)
    except Exception as error:  # transformers raises errors of any type for a broken checkpoint
        raise CheckpointError(
            f"{source.model} is not a checkpoint for {files.task.name}: {first_line(error)}"
        ) from error
    return replace(_checkpoint(source, files, model), grids=None if packed is None else stored_weights(packed))


def _checkpoint(source: Source, files: CheckpointFiles, model: PreTrainedModel) -> Checkpoint:
    longest = _max_length(source, files, position_limit(model))
    return Checkpoint(
        **vars(files), model=model, max_length=longest, pooling=source.pooling, late_chunking=source.late_chunking
    )


def _max_length(source: Source, files: CheckpointFiles, positions: int | None) -> int:
    """Return the most tokens of one row: the user's limit, or the lowest of checkpoint, task and `positions`.

    A limit that sentence-transformers saved takes precedence over the tokenizer's, as it does there. Raises
    CheckpointError for a limit above `positions`, and where there is no limit.
    """
    if source.max_length is not None:
        if positions is not None and source.max_length > positions:
            raise CheckpointError(
                f"--max-length {source.max_length} exceeds the {positions} positions this model has; use at most that"
            )
        return source.max_length
    saved = files.sentence.max_length if files.sentence is not None else None
    if not saved and files.tokenizer.model_max_length < NO_LIMIT:
        saved = files.tokenizer.model_max_length
    limits = [limit for limit in (positions, saved, files.task.longest) if limit]
    if not limits:
        raise CheckpointError(f"{source.model} does not say how long a text may be; set the limit with --max-length")
    return min(limits)
