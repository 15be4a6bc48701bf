"""Reformer: attends within buckets of random hashes (arXiv:2001.04451)."""

from __future__ import annotations

REFUSED = (
    "its tokens see those in the buckets that random hashes put them into; the fused attention over a cache sees all "
    "of them"
)
