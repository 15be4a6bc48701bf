"""Settings of a published model that change without a build: its batching, instances, threads, slots and queue.

They are in config.pbtxt and serving.json alone, and nothing else in either depends on them. The result
equals, byte for byte, that of a build with these options. Settings are named by their keys in models.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from builder.common.errors import RepositoryError, SpecError
from builder.engines import graph_engine
from builder.repository.config.render import CONFIG, parse
from builder.runtime.contract import FILE, ContractError, EncoderServing, GenerationServing, Serving, dump, load

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
        shapes = graph_engine(serving.executor).buckets(batching.max_rows, serving.max_length, batching.token_budget)
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
