"""Verified is a type that only a successful comparison returns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.common.errors import VerificationError
from builder.repository.verdict import Comparison, ParityBound, Unverified, Verified
from tests.reports import REPORT
from tests.repository.test_publish import _entries

PASSED = Comparison((ParityBound("the error", 1e-6, at_most=1e-4), ParityBound("the cosine", 0.999, at_least=0.99)))


def test_passed_comparison_makes_entries_verified() -> None:
    verified = Verified.after(PASSED, _entries(b""), REPORT)
    assert verified.report.verified
    assert verified.report.verdict.startswith("verified: ")
    assert "a CPU" in verified.report.verdict
    assert not Unverified(_entries(b""), REPORT).report.verified
    assert REPORT.verdict.startswith("not verified: ")


@pytest.mark.parametrize(
    ("bounds", "missed"),
    [
        (
            (ParityBound("the error", 2e-4, at_most=1e-4),),
            "the error is 0.0002, at most 0.0001 is right. Nothing was publ",
        ),
        (
            (ParityBound("the error", 0.0, at_most=1e-4), ParityBound("the cosine", 0.98, at_least=0.99)),
            "the cosine is 0.98, at l",
        ),
        ((ParityBound("the error", float("nan"), at_most=1e-4),), "the error is nan"),
        ((), "nothing was compared"),
    ],
)
def test_failed_comparison_raises(bounds: tuple[ParityBound, ...], missed: str) -> None:
    with pytest.raises(VerificationError, match=missed):
        Verified.after(Comparison(bounds), _entries(b""), REPORT)


def test_verified_cannot_be_created_otherwise() -> None:
    with pytest.raises(TypeError, match="a comparison makes entries Verified"):
        Verified(_entries(b""), REPORT)
    verified = Verified.after(PASSED, _entries(b"one"), REPORT)
    with pytest.raises((TypeError, ValueError)):
        replace(verified, entries=_entries(b"two"))
    with pytest.raises(TypeError, match="compared with nothing"):
        Unverified(verified.entries, verified.report)
