"""NumPy for encoders: tables in three precisions."""

from __future__ import annotations

from typing import ClassVar

from builder.engines.encoding import EncodingEngine, Variant
from builder.engines.numpy import BACKEND


class NumPyEncoding(EncodingEngine):
    name = BACKEND
    titles: ClassVar = {"cpu": ""}
    auto = ("fp32", "int8")
    variants = (Variant("fp32", BACKEND), Variant("fp16", BACKEND), Variant("int8", BACKEND))


ENCODING = NumPyEncoding()
