"""Embed texts: one vector if the checkpoint pools its tokens, one vector a token if it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...fields import Field, InputError, Tensors, one_each, option
from .. import task


class Task(task.Task):
    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        prompt = (Field("prompt_name", "TYPE_STRING", optional=True),) if parameters["prompts"] else ()
        return (Field("text_input", "TYPE_STRING"), *prompt)

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        size = parameters["size"]
        return (Field("embedding", "TYPE_FP32", (size,) if parameters["pooled"] else (-1, size)),)

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts = one_each(tensors, "text_input")
        prompts: Mapping[str, str] = self.parameters["prompts"]
        name = option(tensors, "prompt_name", self.parameters["default_prompt"]) if prompts else None
        if name is not None and name not in prompts:
            raise InputError(f"prompt_name is {name!r}; this model has {', '.join(sorted(prompts))}")
        prefix = prompts[name] if name is not None else ""
        return task.EncodingJob([prefix + text for text in texts], {}, self.wants_truncation(tensors))

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        if self.parameters["pooled"]:
            return {"embedding": np.stack([output["features"] for output in outputs])}
        if len({len(row.encoding) for row in rows}) > 1:
            raise InputError(
                "the texts of this request have different numbers of tokens, so their features have no common "
                "shape; send one text a request"
            )
        return {"embedding": np.stack([o["features"][: len(row.encoding)] for o, row in zip(outputs, rows)])}
