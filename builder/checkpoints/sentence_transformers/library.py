"""Let sentence-transformers, the reference for its own checkpoints, use a model that is loaded already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


@contextmanager
def loading(model: PreTrainedModel) -> Iterator[None]:
    """Let sentence-transformers use `model` in the block, in place of one that it would load itself.

    Its own would take as much memory again, by settings that the project does not follow: config.json may name a
    kernel that transformers would download.
    """
    from sentence_transformers.base.modules import Transformer  # takes seconds to import

    own = Transformer._load_model
    Transformer._load_model = lambda *arguments, **options: model
    try:
        yield
    finally:
        Transformer._load_model = own
