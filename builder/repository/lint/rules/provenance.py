"""Provenance

The files of a build, the processor that it was measured on, and the known defects of its release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from builder.common.machine import cpu
from builder.common.releases import missing_fixes
from builder.repository.lint.findings import Problem
from builder.repository.lint.repository import ModelVersion, Repository, RepositoryModel
from builder.repository.lint.rule import WARNING, rule
from builder.repository.report.record import REPORT
from builder.repository.signatures import unsigned
from builder.runtime.contract import FILE


@rule(
    "TR801",
    wrong="build.json that was edited and is not JSON any more",
    right="build.json as it was built",
)
def has_a_report_that_can_be_read(model: RepositoryModel) -> Iterator[Problem]:
    """Check that build.json, if there is one, is the report that a build wrote.

    Without it the release that the model is for, and the bytes that were verified, are unknown.
    """
    path = model.path / REPORT
    if not path.is_file():
        return
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield Problem(f"build.json is not JSON: {error}", "build it again", file=REPORT)
        return
    if not isinstance(document, dict):
        yield Problem("build.json is not a report of a build", "build it again", file=REPORT)


@rule(
    "TR802",
    wrong="a tokenizer.json that was replaced by hand",
    right="build-repo MODEL, with the tokenizer in its checkpoint",
)
def is_what_was_built(model: RepositoryModel) -> Iterator[Problem]:
    """Check that every file of a build is there, byte for byte.

    What was verified is these bytes. Another tokenizer, graph or program may load and answer otherwise.
    """
    recorded = model.recorded.get("files")
    files = recorded.get(model.name) if isinstance(recorded, dict) else None
    for name, digest in files.items() if isinstance(files, dict) else ():
        path = model.path / name
        if not path.is_file():
            yield Problem(f"{name} is missing", file=name)
        elif model.repository.digests.of(path) != digest:
            yield Problem(f"{name} is not the file that was built", "build it again", file=name)


def is_front(model: RepositoryModel) -> bool:
    """Return True if a model's report is its own: an engine beside its front has the front's."""
    return bool(model.recorded) and model.recorded.get("name") == model.name


@rule(
    "TR803",
    WARNING,
    wrong="a model that was chosen on a processor with AVX512 VNNI, on one with AVX2 alone",
    right="build-repo MODEL --precision auto, on the processor that is to serve",
)
def was_chosen_on_such_a_processor(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a precision that was chosen for an instruction set runs on a processor that has it.

    On another one the model may be slower than another that the build measured.
    """
    tuned_for, chosen_on = model.recorded.get("tuned_for"), model.recorded.get("cpu")
    flags = [str(name) for name in tuned_for] if is_front(model) and isinstance(tuned_for, list) else []
    if flags and not set(flags) & set(cpu()["flags"]):
        chosen_on = chosen_on.get("model") if isinstance(chosen_on, dict) else "another processor"
        problem = f"chosen on {chosen_on} for its {' or '.join(flags)}, which this processor lacks"
        yield Problem(problem, "it may be slow here; build it again here to measure", file=REPORT)


@rule(
    "TR804",
    WARNING,
    wrong="build-repo MODEL --triton 24.10, served to strangers",
    right="build-repo MODEL",
    source="builder/common/releases.toml: NVIDIA's bulletins, and pull requests of triton-inference-server/server",
)
def has_a_release_that_is_mended(repository: Repository) -> Iterator[Problem]:
    """Check that a model is served by a release that fixes what clients can do to older ones.

    Requests with too large a shape, or in many chunks, end an old server or worse. The gateway refuses such requests,
    if clients reach nothing else.
    """
    releases: dict[str, list[str]] = {}
    for model in repository.by_name.values():
        if model.release is not None and (is_front(model) or not model.recorded):
            releases.setdefault(model.release, []).append(model.name)
    for release, names in releases.items():
        fixes = missing_fixes(release)
        if fixes:
            reasons = "; ".join(f"{fix.what} ({fix.source})" for fix in fixes)
            yield Problem(
                f"{', '.join(names)}: Triton {release} lacks fixes: {reasons}",
                f"serve on {fixes[-1].since} or later, or let clients reach the gateway alone",
            )


@rule(
    "TR805",
    wrong="build-repo check --verify-key key.pub, of a model that was changed after it was signed",
    right="build-repo sign, with the publisher's key",
    source="builder/repository/signatures.py; OpenSSF, model-signing",
)
def is_signed(repository: Repository) -> Iterator[Problem]:
    """Check that, given a key, every model is signed by it, and nothing in it has changed since.

    Without a key nothing is checked.
    """
    if repository.verify_key is not None and repository.folders:
        for sentence in unsigned(repository.path, repository.verify_key):
            name, _, problem = sentence.partition(": ")
            yield Problem(problem, model=name)


@rule(
    "TR806",
    wrong="a model in int8 that was built with AVX512 VNNI, on a processor with AVX2 alone",
    right="build-repo MODEL --precision int8, on the processor that is to serve",
    source="builder/runtime/cpus.py, refuse_cpu",
)
def runs_on_this_processor(version: ModelVersion) -> Iterator[Problem]:
    """Check that this processor computes what was verified on another one.

    Without VNNI an x86 processor adds products of bytes in too few bits: answers would be wrong, and the model refuses
    to load. Ignore it where another machine serves.
    """
    needed = version.serving.needs_cpus_with if version.is_served and version.serving is not None else ()
    flags = set(cpu()["flags"])
    if needed and "avx2" in flags and not flags & set(needed):
        problem = f"its int8 products overflow on this processor, which has none of {', '.join(needed)}"
        yield Problem(
            problem, "serve it on one that has, or build it again here", file=version.file(version.path / FILE)
        )
