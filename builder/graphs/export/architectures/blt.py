"""BLT: reads bytes, in patches (arXiv:2412.09871)."""

from __future__ import annotations

REFUSED = "it reads bytes, in patches that a second model cuts: it has no tokens of a tokeniser"
