"""Wiring

Calls between models: fronts and their engines, BLS, ensembles.
"""

from __future__ import annotations

from collections.abc import Iterator

from builder.repository.config.render import CONFIG
from builder.repository.lint.calls import read_source
from builder.repository.lint.findings import Problem
from builder.repository.lint.repository import ModelVersion
from builder.repository.lint.rule import WARNING, rule
from builder.runtime.contract import FILE


@rule(
    "TR501",
    wrong="""model_repository/
  classifier/          # its engine, classifier_model/, was left out of a copy""",
    right="""model_repository/
  classifier/
  classifier_model/""",
)
def has_its_engine(version: ModelVersion) -> Iterator[Problem]:
    """Check that the engine that a front calls is in the repository.

    A front that was built with an engine of its own calls it through BLS, and every request fails without it.
    """
    repository, file = version.model.repository, f"{version.number}/{FILE}"
    name = version.serving.engine if version.serving is not None else None
    engine = repository.by_name.get(name or "")
    if name is not None and not (repository.path / name / CONFIG).is_file():
        yield Problem(f"its engine {name} is not in the repository", file=file)
    elif engine is not None and int(version.number) not in engine.served_numbers:
        problem = f"it calls version {version.number} of {name}, which Triton does not load"
        advice = f"have both served: build-repo rollback {version.model.name} {version.number}"
        yield Problem(problem, advice, file=file)


@rule(
    "TR502",
    WARNING,
    wrong='pb_utils.InferenceRequest(model_name="tokenizer", requested_output_names=["ids"], inputs=inputs)',
    right='pb_utils.InferenceRequest(model_name="tokenizer", requested_output_names=["ids"], inputs=inputs)',
    source="python_backend, README.md, Business Logic Scripting",
)
def calls_models_that_are_there(version: ModelVersion) -> Iterator[Problem]:
    """Check that models that Python calls by a literal name are in the repository, with the outputs that it requests.

    Triton does not check such calls before the first request. A name that is computed is not checked here either.
    """
    models = version.model.repository.by_name
    for path in version.python_files:
        source = read_source(path)
        for call in source.calls if source is not None else ():
            file = version.file(path)
            where = f"{file}, line {call.line}"
            target = models.get(call.model)
            if target is None:
                yield Problem(f"{where} calls {call.model}, which is not in the repository", "add the model", file=file)
                continue
            outputs = {tensor.name for tensor in target.config.output}
            for name in sorted(set(call.outputs) - outputs) if outputs else ():
                problem = f"{where} asks {call.model} for {name}; it has {', '.join(sorted(outputs))}"
                yield Problem(problem, "ask for one of them", file=file)
