"""Attributes of other libraries that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ABSENT = object()


@contextmanager
def replaced(*replacements: tuple[Any, str, object]) -> Iterator[None]:
    """Give attributes, each of an owner by its name, other values within the `with`. New ones are removed again."""
    before = [vars(owner).get(name, ABSENT) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(replacements, before, strict=True):
            if value is not ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
