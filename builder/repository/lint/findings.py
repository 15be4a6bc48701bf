"""Findings of rules: location, severity, advice, and an edit of config.pbtxt if one is safe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Severity of a finding.

    With an error the model does not load, or is not what was built. With a warning it loads, but not as intended.
    """

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Edit:
    """Change of a field of config.pbtxt that has no effect, or a wrong one.

    `field`: a field of the configuration, or one of its parameters as `parameters[NAME]`. `value`: the new text of the
    field; None: the field is left out.
    """

    field: str
    value: str | None = None

    def __str__(self) -> str:
        return f"left out {self.field}" if self.value is None else f'wrote {self.field}: "{self.value}"'


@dataclass(frozen=True)
class Problem:
    """Problem that a rule yields.

    `field`: of the configuration, such as `input[0].dims`; `file`: relative to the model's folder, if it is not the
    configuration; `model`: for a rule about several models.
    """

    found: str
    instead: str = ""
    field: str = ""
    file: str = ""
    model: str = ""
    fix: Edit | None = None


@dataclass(frozen=True)
class Finding:
    """Problem with its rule and its location.

    `file`: relative to the repository; `line`: in it, from 1, or None if unknown.
    """

    code: str
    severity: Severity
    model: str
    file: str
    field: str
    line: int | None
    found: str
    instead: str
    fix: Edit | None = None

    @property
    def text(self) -> str:
        """Problem and advice in one sentence."""
        return f"{self.found}; {self.instead}" if self.instead else self.found

    def __str__(self) -> str:
        return f"{self.model}: {self.text}" if self.model else self.text
