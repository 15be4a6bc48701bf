"""Versions

Folders of a model that are versions, those that Triton loads, and the files that they must have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import model_config_pb2

from builder.common.errors import RepositoryError
from builder.repository.config.render import CONFIG, parse
from builder.repository.lint.findings import Problem
from builder.repository.lint.repository import BESIDE_VERSIONS, FILES, NUMBER, ModelVersion, RepositoryModel
from builder.repository.lint.rule import WARNING, rule


@rule(
    "TR151",
    wrong="""classifier/
  config.pbtxt
  model.onnx""",
    right="""classifier/
  config.pbtxt
  1/model.onnx""",
    source="core, src/model_repository_manager/model_lifecycle.cc, VersionsToLoad",
)
def has_a_version(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a model has a version folder, named by a number, that its version_policy lets Triton load.

    The file of a model lies in a folder such as `1`. Without a version to load, Triton refuses the model.
    """
    numbers = ", ".join(version.number for version in model.versions)
    if not numbers and not model.served_numbers:
        yield Problem("has no version folder such as 1/", "move the model's file into one")
    elif not model.served_numbers:
        yield Problem(f"version_policy lets none of its versions {numbers} load", "", "version_policy")


@rule(
    "TR152",
    WARNING,
    wrong="version_policy { specific { versions: [ 2, 3 ] } }   # and there is no folder 3",
    right="version_policy { specific { versions: [ 2 ] } }",
    source="core, src/model_repository_manager/model_lifecycle.cc, VersionsToLoad",
)
def has_the_versions_it_asks_for(model: RepositoryModel) -> Iterator[Problem]:
    """Check that the versions that version_policy names exist.

    Triton logs an error for one that does not, loads the others and reports the model as ready: requests for the
    missing version are refused.
    """
    absent = sorted(set(model.config.version_policy.specific.versions) - model.served_numbers)
    if absent and model.served_numbers:
        problem = f"version_policy asks for version {', '.join(map(str, absent))}, which is not there"
        yield Problem(problem, "add its folder or leave it out", "version_policy")


@rule(
    "TR153",
    WARNING,
    wrong="""classifier/
  01/model.onnx""",
    right="""classifier/
  1/model.onnx""",
    source="core, src/model_repository_manager/model_lifecycle.cc, VersionsToLoad",
)
def versions_have_no_leading_zeros(model: RepositoryModel) -> Iterator[Problem]:
    """Check that the number of a version has no leading zeros.

    Triton ignores such a folder, and serves another version than was meant, or none.
    """
    for path in model.path.iterdir():
        if path.is_dir() and re.fullmatch(r"0\d+", path.name):
            number = path.name.lstrip("0") or "0"
            yield Problem(f"{path.name}/ is passed over", f"rename it: {number}/", file=path.name)


@rule(
    "TR154",
    wrong="""classifier/
  1/model.onnx
  2_broken/model.onnx""",
    right="""classifier/
  1/model.onnx
  broken_2/model.onnx""",
    source="core, src/model_repository_manager/model_lifecycle.cc, VersionsToLoad, which reads names with std::stoll",
)
def versions_are_whole_numbers(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a folder that is not a version does not begin with a number.

    Triton reads `2_broken` as version 2, prefers it as the latest, and then finds no folder `2` to load.
    """
    for path in model.path.iterdir():
        match = NUMBER.match(path.name)
        if not path.is_dir() or path.name in BESIDE_VERSIONS or path.name.startswith("0") or match is None:
            continue
        number = match.group()
        is_loaded = match.end() < len(path.name) and int(number) in model.served_numbers
        if is_loaded and not (model.path / number.strip()).is_dir():
            problem = f"{path.name}/ is taken for version {number}, which is not there"
            yield Problem(problem, "rename it so that it does not begin with a number", file=path.name)


@rule(
    "TR155",
    wrong="""classifier/
  1/classifier.onnx""",
    right="""classifier/
  1/model.onnx""",
    source="core, src/model_config_utils.cc, AutoCompleteBackendFields",
)
def has_the_file_that_its_backend_opens(version: ModelVersion) -> Iterator[Problem]:
    """Check that each version has the file that its backend opens: default_model_filename or the backend's own default.

    The defaults are model.onnx, model.xml with model.bin, model.plan, model.pt and model.py.
    """
    config, engine, file = version.model.config, version.model.engine, version.file(version.graph)
    if config.backend not in FILES or config.cc_model_filenames or version.graph.exists() or version.model.is_ensemble:
        return
    if config.backend == "pytorch" and any((version.path / name).exists() for name in ("model.py", "model.pt2")):
        return
    if engine is None or not engine.compiles_where_served:
        yield Problem(f"{file} is missing", file=file)
    elif not version.recipe.is_dir():  # with one, TR653 says what to do
        again = f"compile it again: build-repo compile {version.model.repository.path}"
        yield Problem(f"{file} is missing; {again}", file=file)


@rule(
    "TR156",
    wrong="""input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }         # config.pbtxt
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }   # 1/config.pbtxt, as it was built""",
    right="""input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }   # both""",
)
def has_the_tensors_that_it_was_built_with(version: ModelVersion) -> Iterator[Problem]:
    """Check that the configuration that Triton reads has the tensors of the copy that a built version keeps.

    The code of the version was emitted for those. Under other names, types or sizes, or with an input that is required
    now, the model loads and the requests of its documentation fail. Batching and instances may be edited.
    """
    own = version.path / CONFIG
    if not version.is_served or version.model.file != CONFIG or not own.is_file():
        return
    try:
        built = parse(own.read_text("utf-8", errors="replace"), version.model.name)
    except RepositoryError as error:
        yield Problem(str(error), "build it again", file=version.file(own))
        return
    config = version.model.config
    if config.max_batch_size != built.max_batch_size:
        found = f"max_batch_size is {config.max_batch_size}; version {version.number} was built with "
        yield Problem(found + str(built.max_batch_size), "build it again with --max-batch-size", "max_batch_size")
    for kind in ("input", "output"):
        before = {tensor.name: tensor for tensor in getattr(built, kind)}
        now = {tensor.name: tensor for tensor in getattr(config, kind)}
        for name in sorted(before.keys() ^ now.keys()):
            found = f"{kind} {name} is " + ("not there" if name in before else "new")
            yield Problem(f"{found}: see {version.file(own)}", "write what is there", kind)
        for name in sorted(before.keys() & now.keys()):
            for field in ("data_type", "dims", "optional", "reshape"):
                if _shown(now[name], field) != _shown(before[name], field):
                    found = f"{field} of {kind} {name} is {_shown(now[name], field)}; version {version.number} was "
                    yield Problem(found + f"built with {_shown(before[name], field)}", "write that", f"{kind}[{name}]")


def _shown(tensor: model_config_pb2.ModelInput | model_config_pb2.ModelOutput, field: str) -> str:
    """Return the value of a field of a tensor as a finding shows it; empty for fields that outputs do not have."""
    value: Any = getattr(tensor, field, None)
    if field == "data_type":
        return str(model_config_pb2.DataType.Name(value))
    return str(list(value)) if field == "dims" else str(value).strip().lower() or "not there"
