"""Sentence embeddings: what feature extraction answers, always one vector a text."""

from __future__ import annotations

from .feature_extraction import Task

__all__ = ["Task"]
