from __future__ import annotations

import numpy as np
import pytest

from builder.runtime.contract import RequestLimits
from builder.runtime.fields import (
    InputError,
    as_bytes,
    choice,
    count,
    one_each,
    option,
    readable,
    refuse_large,
    strings,
)


def _bytes(*rows: list[bytes]) -> np.ndarray:
    return np.array(rows, dtype=object)


def test_strings_decode_unicode() -> None:
    text = "naïve – 東京 🚆 Straße"
    assert one_each({"t": _bytes([text.encode()])}, "t") == [text]
    assert as_bytes([[text]])[0, 0] == text.encode()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (_bytes([b"\xff\xfe"]), "byte 0 is not UTF-8"),
        (_bytes([b"fine"], [b"a\x80"]), "row 1: byte 1 is not UTF-8"),
        (_bytes([b""]), "row 0, is empty"),
        (_bytes([b" \n "]), "row 0, is empty"),
        (np.zeros((0, 1), dtype=object), "at least one of each"),
        (np.zeros((1, 0), dtype=object), "at least one of each"),
    ],
)
def test_strings_refuse_bytes_that_are_not_text(array: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        strings({"t": array}, "t")


def test_one_each_refuses_two_texts_in_a_row() -> None:
    with pytest.raises(InputError, match="one text a row"):
        one_each({"t": _bytes([b"one", b"two"])}, "t")


def test_options_are_typed_and_checked() -> None:
    tensors = {"k": np.array([[3], [3]]), "name": _bytes([b"SIMPLE"])}
    assert option(tensors, "absent", 7) == 7
    assert count(tensors, "k", 1) == 3
    assert choice(tensors, "name", "none", ("none", "simple")) == "simple"
    with pytest.raises(InputError, match="k is 3; expected at least 4"):
        count(tensors, "k", 1, minimum=4)
    with pytest.raises(InputError, match="expected one of first, max"):
        choice(tensors, "name", "first", ("first", "max"))
    with pytest.raises(InputError, match="differs between the rows"):
        option({"k": np.array([[1], [2]])}, "k", 0)


def test_request_beyond_a_limit_is_refused_before_it_is_read() -> None:
    limits = RequestLimits(request_bytes=10, list_values=3)
    refuse_large({"t": _bytes([b"12345"], [b"67890"]), "n": np.zeros((2, 3), np.int32)}, limits)
    refuse_large({}, limits, {"a": "0123456789", "b": 7})
    with pytest.raises(InputError, match=r"the request has 11 bytes of text; this model takes at most 10 \(serving"):
        refuse_large({"t": _bytes([b"12345"], [b"678901"])}, limits)
    with pytest.raises(InputError, match="the request has 11 bytes of text"):
        refuse_large({"t": _bytes([b"12345"])}, limits, {"a": "678901"})
    with pytest.raises(InputError, match="n has 4 values; this model takes at most 3"):
        refuse_large({"n": np.zeros((1, 4), np.int32)}, limits)
    with pytest.raises(InputError, match="top_k is 4; expected at most 3"):
        count({"top_k": np.array([[4]])}, "top_k", 1, maximum=limits.list_values)


def test_error_messages_are_utf_8_and_cut() -> None:
    """Triton's TritonError refuses a lone surrogate with "incompatible constructor arguments"."""
    assert readable(InputError("no \ud83d here")) == "no \\ud83d here"
    assert readable(InputError("a" * 5000)) == "a" * 1000 + " ..."
