"""Text from text, by an encoder-decoder, as its checkpoint was trained to."""

from __future__ import annotations

from builder.checkpoints.tasks.base import Seq2SeqTask


class Text2TextGeneration(Seq2SeqTask):
    name = "text2text-generation"


TASK = Text2TextGeneration()
