"""Text in another language. `translation_xx_to_yy` says which where a request does not."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

from builder.tasks.base import Instructions, Seq2SeqTask

PAIR = re.compile(r"translation_(\w+)_to_(\w+)")


class Translation(Seq2SeqTask):
    name = "translation"

    def answers_to(self, name: str) -> bool:
        return name == self.name or PAIR.fullmatch(name) is not None

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return False  # a checkpoint does not say that it translates

    def instructions(self, config: PreTrainedConfig, name: str) -> Instructions:
        """As transformers' pipeline had it: config.json's task_specific_params for each pair of languages."""
        pairs, options = {}, {}
        for key, settings in (getattr(config, "task_specific_params", None) or {}).items():
            match = PAIR.fullmatch(key)
            if match:
                options[key] = {option: value for option, value in settings.items() if option != "prefix"}
            if match and "prefix" in settings:
                pairs[f"{match[1]} to {match[2]}"] = str(settings["prefix"])
        wanted = PAIR.fullmatch(name)
        source, target = (wanted[1], wanted[2]) if wanted else (None, None)
        chosen = options.get(name, {}) if wanted or not pairs else _agreed(list(options.values()))
        return Instructions(None, pairs, chosen, source, target)


def _agreed(options: list[dict[str, Any]]) -> dict[str, Any]:
    """What all pairs say alike, which holds for a model that is told the pair by each request."""
    return {name: value for name, value in options[0].items() if all((name, value) in o.items() for o in options)}


TASK = Translation()
