"""A shorter text with the meaning of a text."""

from __future__ import annotations

from transformers import PreTrainedConfig

from builder.checkpoints.tasks.base import Instructions, Seq2SeqTask


class Summarization(Seq2SeqTask):
    name = "summarization"

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return False  # no configuration tells that a checkpoint summarises

    def instructions(self, config: PreTrainedConfig, name: str) -> Instructions:
        """Read config.json's task_specific_params for this task, as transformers' pipeline did."""
        options = dict((getattr(config, "task_specific_params", None) or {}).get("summarization", {}))
        return Instructions(prefix=options.pop("prefix", None), options=options)


TASK = Summarization()
