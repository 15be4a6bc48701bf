"""Embed sentences: feature extraction that always returns one vector a text."""

from __future__ import annotations

from .feature_extraction import Task

__all__ = ["Task"]
