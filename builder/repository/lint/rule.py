"""Rules: functions of a repository, a model or a version that yield problems, with their documentation.

A rule's docstring describes its check of a repository and, after an empty line, the reason. A rule without both, or
without an example, is refused.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from builder.common.errors import BuilderError, first_line
from builder.repository.lint import rules as package
from builder.repository.lint.findings import Finding, Problem, Severity
from builder.repository.lint.pbtxt import span_of
from builder.repository.lint.repository import ModelVersion, Repository, RepositoryModel

SCOPES: dict[type, Callable[[Repository], Sequence[Repository | RepositoryModel | ModelVersion]]] = {
    Repository: lambda repository: [repository],
    RepositoryModel: lambda repository: repository.models,
    ModelVersion: lambda repository: repository.versions,
}
WARNING = Severity.WARNING
Check = Callable[[Any], Iterator[Problem]]
"""Function of a Repository, a RepositoryModel or a ModelVersion, as its annotation says."""


@dataclass(frozen=True)
class Rule:
    """Rule of the linter.

    `what`, `why`, `wrong`, `right`: its documentation. `source`: where Triton, or another program, enforces it.
    """

    code: str
    severity: Severity
    topic: str
    what: str
    why: str
    wrong: str
    right: str
    source: str
    scope: type
    check: Check

    def findings(self, repository: Repository) -> Iterator[Finding]:
        """Yield the findings; unforeseen damage of one file does not end the check of the others."""
        for subject in SCOPES[self.scope](repository):
            try:
                problems = list(self.check(subject))
            except BuilderError:
                raise
            except Exception as error:
                found = f"this rule could not be checked ({type(error).__name__}: {first_line(error)})"
                advice = "a file of the model is damaged; if none is, this is a bug worth reporting"
                problems = [Problem(found, advice)]
            for problem in problems:
                yield _finding(self, subject, problem)


RULES: dict[str, Rule] = {}


def rule(
    code: str, severity: Severity = Severity.ERROR, *, wrong: str, right: str, source: str = ""
) -> Callable[[Check], Check]:
    """Register a function as a rule: of errors, unless it says WARNING.

    Raises ValueError for a code that another rule has, or a rule without an explanation or an annotated argument.
    """

    def register(check: Check) -> Check:
        what, _, why = inspect.cleandoc(check.__doc__ or "").partition("\n\n")
        missing = [
            name for name, text in (("what", what), ("why", why), ("wrong", wrong), ("right", right)) if not text
        ]
        if missing:
            raise ValueError(f"rule {code} does not say {missing[0]}: see {__name__}")
        if code in RULES:
            raise ValueError(f"two rules have the code {code}: {RULES[code].check.__name__} and {check.__name__}")
        scope: Any = next(iter(typing.get_type_hints(check).values()), None)
        if scope not in SCOPES:
            names = ", ".join(known.__name__ for known in SCOPES)
            raise ValueError(f"rule {code} does not say what it sees: annotate its argument with one of {names}")
        topic = (inspect.getdoc(inspect.getmodule(check)) or "").split("\n\n")[0]
        what, why = " ".join(what.split()), " ".join(why.split())
        RULES[code] = Rule(code, severity, topic, what, why, wrong.strip(), right.strip(), source, scope, check)
        return check

    return register


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return every rule of every module in rules/, by code."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return tuple(RULES[code] for code in sorted(RULES))


def _finding(rule: Rule, subject: Repository | RepositoryModel | ModelVersion, problem: Problem) -> Finding:
    """Return the finding of a problem. A problem of a version that Triton does not load is a warning."""
    if isinstance(subject, Repository):
        file = f"{problem.model}/{problem.file}" if problem.file else problem.model
        return Finding(
            rule.code, rule.severity, problem.model, file, problem.field, None, problem.found, problem.instead
        )
    model = subject.model if isinstance(subject, ModelVersion) else subject
    is_unserved = isinstance(subject, ModelVersion) and not subject.is_served
    in_config = not problem.file
    span = span_of(problem.field, model.spans) if in_config else None
    return Finding(
        code=rule.code,
        severity=WARNING if is_unserved else rule.severity,
        model=problem.model or model.name,
        file=f"{model.name}/{problem.file or model.file}",
        field=problem.field,
        line=None if span is None else span.line,
        found=problem.found,
        instead=problem.instead,
        fix=problem.fix if in_config else None,
    )
