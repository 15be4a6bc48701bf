"""Settings of a published model that change without a build: its batching, instances, threads, slots and queue.

They are in config.pbtxt and serving.json alone, and nothing else in either depends on them. The result
equals, byte for byte, that of a build with these options. Settings are named by their keys in models.yaml.

New settings are published as the model's next version. Unchanged files are hard links. The measurements of the build
stay valid; the version's report names the changed settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from builder.common.errors import RepositoryError, SpecError
from builder.common.memory import encoder_call, largest_call
from builder.engines import graph_engine
from builder.options.choices import KEEP
from builder.repository.check import check
from builder.repository.config.entries import numbered
from builder.repository.config.render import CONFIG, parse, quote
from builder.repository.locks import write_synced
from builder.repository.publish import move_in, remove_old_versions, report_files
from builder.repository.report.record import SUMMARY, BuildReport, read_report
from builder.repository.signing_keys import SIGNATURE
from builder.repository.transaction import changing
from builder.repository.versions import activate, adopt, copy_beside, require_front, served_number, version_numbers
from builder.runtime.contract import (
    FILE,
    ContractError,
    EncoderServing,
    GenerationServing,
    Serving,
    dump,
    load,
    load_encoder,
)

Settings = Mapping[str, int]

LINES = {  # in config.pbtxt as builder/repository/config/render writes it, with one instance group
    "max_batch_size": re.compile(r"^(max_batch_size: )(\d+)$", re.MULTILINE),
    "max_queue_delay_us": re.compile(r"^(  max_queue_delay_microseconds: )(\d+)$", re.MULTILINE),
    "instances": re.compile(r"^(  count: )(\d+)$", re.MULTILINE),
}
POLICY = re.compile(r"^(  specific { versions: \[ )(\d+) \] }$", re.MULTILINE)
ENCODER = ("instances", "threads", "max_batch_size", "max_queue_delay_us", "serving.token_budget", "serving.call_cost")
DECODER = ("threads", "slots", "serving.prefill_tokens", "serving.queue.max_size")


def read_settings(version: Path) -> dict[str, int]:
    """Read the settings of the model whose version folder this is; `threads` is 0 if it uses all cores.

    Raises SpecError for a model whose engine is a Triton model of its own, RepositoryError for files that another tool
    wrote.
    """
    serving = _load(version)
    text = (version.parent / CONFIG).read_text("utf-8")
    if isinstance(serving, EncoderServing):
        assert serving.session is not None
        return {
            **{name: int(_line(text, line, name)[2]) for name, line in LINES.items()},
            "threads": serving.session.threads,
            "serving.token_budget": serving.batching.token_budget,
            "serving.call_cost": serving.batching.call_cost,
        }
    settings = {
        "threads": serving.session.threads,
        "slots": serving.arena.slots,
        "serving.queue.max_size": serving.queue,
    }
    if serving.prefill_tokens is not None:
        settings["serving.prefill_tokens"] = serving.prefill_tokens
    return settings


def with_settings(version: Path, settings: Settings) -> dict[str, bytes]:
    """Return the files that change, by their paths in the model's folder. Raises SpecError and RepositoryError."""
    serving = _load(version)
    known = ENCODER if isinstance(serving, EncoderServing) else DECODER
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise SpecError(f"{unknown[0]} needs a build; without one, {', '.join(known)} can be changed")
    text = (version.parent / CONFIG).read_text("utf-8")
    for name in LINES:
        if name in settings:
            text = with_number(text, LINES[name], name, settings[name])
    config = parse(text, version.parent.name)
    too_big = [size for size in config.dynamic_batching.preferred_batch_size if size > config.max_batch_size]
    if too_big:  # Triton would not load it
        raise SpecError(
            f"{config.name}: its preferred batch size {too_big[0]} exceeds max_batch_size {config.max_batch_size}; "
            "lower it"
        )
    changed = _encoder(serving, settings) if isinstance(serving, EncoderServing) else _generation(serving, settings)
    return {CONFIG: text.encode(), f"{version.name}/{FILE}": dump(changed).encode()}


def _load(version: Path) -> Serving:
    try:
        serving = load(version)
    except ContractError as error:
        raise RepositoryError(f"{version}: {error}") from error
    if serving.engine is not None:
        raise SpecError(
            f"{version.parent.name}: its engine is a Triton model of its own, whose settings need a build; leave "
            "--executor bls out"
        )
    return serving


def with_number(text: str, line: re.Pattern[str], name: str, number: int) -> str:
    """Return the text of a config.pbtxt with another number in the line for `name`. Raises RepositoryError."""
    match = _line(text, line, name)
    return text[: match.start(2)] + str(number) + text[match.end(2) :]


def _line(text: str, line: re.Pattern[str], name: str) -> re.Match[str]:
    matches = list(line.finditer(text))
    if len(matches) != 1:
        raise RepositoryError(
            f"{CONFIG} has {len(matches)} lines for {name}, not the one that build-repo writes: build it again"
        )
    return matches[0]


def _encoder(serving: EncoderServing, settings: Settings) -> EncoderServing:
    assert serving.session is not None
    batching = replace(
        serving.batching,
        token_budget=max(settings.get("serving.token_budget", serving.batching.token_budget), serving.max_length),
        max_rows=settings.get("max_batch_size", serving.batching.max_rows),
        call_cost=settings.get("serving.call_cost", serving.batching.call_cost),
    )
    if batching.buckets:
        shapes = graph_engine(serving.executor).buckets(batching.max_rows, serving.max_length, batching.padded_budget)
        batching = replace(batching, buckets=shapes)
    session = replace(serving.session, threads=settings.get("threads", serving.session.threads))
    return replace(serving, batching=batching, session=session)


def _generation(serving: GenerationServing, settings: Settings) -> GenerationServing:
    """Return `serving` with other settings.

    A decoder's searches may have as many beams as it has slots, unless the build set another number.
    """
    slots = settings.get("slots", serving.arena.slots)
    all_slots = serving.source is None and serving.beams == serving.arena.slots
    if not all_slots and slots < serving.beams:
        raise SpecError(f"a search of {serving.beams} beams needs as many slots, and {slots} are asked for")
    if serving.arena.blocks is not None and "slots" in settings:
        raise SpecError("slots that share the blocks of a cache need a build; leave slots out")
    return replace(
        serving,
        arena=replace(serving.arena, slots=slots),
        beams=slots if all_slots else serving.beams,
        session=replace(serving.session, threads=settings.get("threads", serving.session.threads)),
        prefill_tokens=settings.get("serving.prefill_tokens", serving.prefill_tokens),
        queue=settings.get("serving.queue.max_size", serving.queue),
    )


def publish_settings(repository: Path, name: str, settings: Settings, reason: str) -> int:
    """Publish the served version of a model with other settings as its next version, and serve it; return its number.

    `reason`: for its report. Raises SpecError for settings that need a build, and RepositoryError; the repository is
    then as before.
    """
    require_front(repository, name)
    entry = repository / name
    with changing(repository, name) as change:
        adopt(change, entry)
        before, number = served_number(entry), max(version_numbers(entry)) + 1
        if before is None:
            raise RepositoryError(
                f"{name} has no version that is served; build-repo versions {name} shows those it has"
            )
        changed = with_settings(entry / str(before), settings)
        report = _report(entry / str(before), number, changed[f"{before}/{FILE}"], settings, reason)
        config = with_number(changed[CONFIG].decode(), POLICY, "version_policy", number)
        own = {
            FILE: changed[f"{before}/{FILE}"],
            CONFIG: _with_memory(config, report).encode() if "slots" in settings else config.encode(),
            **report_files(report, name),
        }
        staged = change.staging / "new" / name
        new = staged / str(number)
        shutil.copytree(entry / str(before), new, copy_function=os.link, ignore=shutil.ignore_patterns(SIGNATURE))
        for file, content in own.items():
            (new / file).unlink(missing_ok=True)  # a hard link: the file it shares must not change
            write_synced(new / file, content)
        copy_beside(staged, number)
        problems = check(staged.parent)
        if problems:
            raise RepositoryError(
                f"the model would not load with {dict(settings)}: {problems[0]}. Nothing was published"
            )
        move_in(change, staged, entry, number)
        activate(change, repository, [name], number)
        change.commit()
        remove_old_versions(repository, name, change.staging / "removed", KEEP, [number, before])
    return number


def _report(before: Path, number: int, serving: bytes, settings: Settings, reason: str) -> BuildReport:
    """Return the report of version `number`, with other settings and the serving.json `serving` than `before` has."""
    report = read_report(before.parent, before.name)
    digests = {**report.files[report.name], f"{before.name}/{FILE}": hashlib.sha256(serving).hexdigest()}
    own = {numbered(path, number, of=int(before.name)): digest for path, digest in digests.items()}
    memory, earlier = report.memory, read_settings(before)
    if memory is not None and "slots" in settings:
        memory = {**memory, "cache": memory["cache"] // earlier["slots"] * settings["slots"]}
    both = earlier, {**earlier, **settings}
    if memory is not None and "bias" in memory:
        old, new = (largest_call(one["serving.prefill_tokens"], one["slots"]) for one in both)
        memory = {**memory, "bias": memory["bias"] // old * new}
    if memory is not None and "activations" in memory:
        length = load_encoder(before).max_length
        old, new = (encoder_call(one["serving.token_budget"], length) for one in both)
        memory = {**memory, "activations": memory["activations"] * new // old}
    changes = ", ".join(f"{key} {value}" for key, value in settings.items())
    return replace(
        report,
        version=number,
        files={**report.files, report.name: own},
        memory=memory,
        settings=f"{changes}, of version {before.name}: {reason}",
    )


def _with_memory(config: str, report: BuildReport) -> str:
    """Return `config` with the model's memory in the summary among its parameters."""
    parameters = parse(config, report.name).parameters
    if SUMMARY not in parameters or report.memory is None:
        return config
    summary = parameters[SUMMARY].string_value
    changed = {**json.loads(summary), "memory": sum(report.memory.values())}
    return config.replace(quote(summary), quote(json.dumps(changed, ensure_ascii=False, separators=(",", ":"))))
