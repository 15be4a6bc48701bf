"""DeepSeek-V4: attends to summaries of windows of the text."""

from __future__ import annotations

REFUSED = (
    "its tokens see summaries of windows of the text, which it appends as each window ends: memory that grows more "
    "slowly than keys and values"
)
