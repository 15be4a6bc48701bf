"""What a rule found: where, how bad, what to write instead, and the edit that writes it where that is safe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """An error does not load, or is not what was built; a warning loads, and does something else than was meant."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Edit:
    """A change of config.pbtxt that takes nothing from anybody.

    `field`: a field of the configuration, or one of its parameters as `parameters[NAME]`. `value`: what a text is to
    be; None: the field is left out.
    """

    field: str
    value: str | None = None

    def __str__(self) -> str:
        return f"left out {self.field}" if self.value is None else f'wrote {self.field}: "{self.value}"'


@dataclass(frozen=True)
class Problem:
    """What a rule yields. `field`: of the configuration, such as `input[0].dims`; `file`: where that is another one
    than the configuration, from the model's folder; `model`: where the rule is about several.
    """

    found: str
    instead: str = ""
    field: str = ""
    file: str = ""
    model: str = ""
    fix: Edit | None = None


@dataclass(frozen=True)
class Finding:
    """A problem with its rule and its place. `file`: from the repository; `line`: of it, from 1, where it is known."""

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
        """What was found and what to write instead, in a sentence."""
        return f"{self.found}; {self.instead}" if self.instead else self.found

    def __str__(self) -> str:
        return f"{self.model}: {self.text}" if self.model else self.text
