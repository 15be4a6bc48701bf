"""Text in another language. `translation_xx_to_yy` names the languages for requests that do not."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

from builder.checkpoints.tasks.base import Instructions, Seq2SeqTask

PAIR = re.compile(r"translation_(\w+)_to_(\w+)")


class Translation(Seq2SeqTask):
    name = "translation"

    def answers_to(self, name: str) -> bool:
        return name == self.name or PAIR.fullmatch(name) is not None

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return False  # no configuration tells that a checkpoint translates

    def instructions(self, config: PreTrainedConfig, name: str) -> Instructions:
        """Read config.json's task_specific_params for each pair of languages, as transformers' pipeline did.

        If `name` has no pair, a language that all pairs share is the default, so that of one pair both are.
        """
        own = getattr(config, "task_specific_params", None) or {}
        translations = {key: (match, own[key]) for key in own if (match := PAIR.fullmatch(key))}
        pairs = {
            f"{m[1]} to {m[2]}": str(params["prefix"]) for m, params in translations.values() if "prefix" in params
        }
        options = {
            key: {option: value for option, value in params.items() if option != "prefix"}
            for key, (_, params) in translations.items()
        }
        named = PAIR.fullmatch(name)
        if named:
            return Instructions(None, pairs, options.get(name, {}), named[1], named[2])
        agreed = _agreed(list(options.values())) if pairs or len(options) == 1 else {}
        sides = ({match[side] for match, _ in translations.values()} for side in (1, 2))
        source, target = (codes.pop() if len(codes) == 1 else None for codes in sides)
        return Instructions(None, pairs, agreed, source, target)


def _agreed(options: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options that are equal for all pairs, which apply if each request names the pair."""
    return {name: value for name, value in options[0].items() if all((name, value) in o.items() for o in options)}


TASK = Translation()
