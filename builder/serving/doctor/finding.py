"""Define what an examination of the machine found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Finding about `subject`.

    `advice`: what to mend; empty if nothing. `stops`: no build works until then. `absent`: it is not here, and most
    builds do not need it.
    """

    subject: str
    found: str
    advice: str = ""
    stops: bool = False
    absent: bool = False
