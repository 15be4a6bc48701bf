"""Score the relevance of documents to a query, with a cross-encoder that reads both together (arXiv:1901.04085).

A decoder reads them in the pieces of its chat template, which are never cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from tokenizers import Encoding

from ...fields import Field, InputError, Tensors, any_text, choice, one_each, strings
from .. import task
from ..pair_texts import common_end, render_pair
from ..scores import FUNCTIONS
from ..text import Text
from ..windows import Window

FILLERS = ("0", "1 2 3 4")  # two texts without a common end, by which the end of a template is found


class Task(task.Task):
    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        template = parameters.get("template") or {}
        reads = bool(template.get("instructed"))
        instruction = (Field("instruction", "TYPE_STRING", optional=True),) if reads else ()
        name = (Field("prompt_name", "TYPE_STRING", optional=True),) if reads and parameters["prompts"] else ()
        return (
            Field("query", "TYPE_STRING"),
            Field("documents", "TYPE_STRING", (-1,)),
            *instruction,
            *name,
            Field("function_to_apply", "TYPE_STRING", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("score", "TYPE_FP32", (-1,)), Field("order", "TYPE_INT32", (-1,)))

    def read(self, tensors: Tensors) -> task.EncodingJob:
        queries = one_each(tensors, "query")
        documents = strings(tensors, "documents")
        if len(queries) != len(documents):
            raise InputError(f"documents has {len(documents)} rows and query {len(queries)}; send one row a query")
        pairs = [(query, document) for query, row in zip(queries, documents) for document in row]
        instruction = self._instruction(tensors)
        options = {
            "shape": (len(documents), len(documents[0])),
            "function": choice(tensors, "function_to_apply", self.parameters["function"], ("sigmoid", "none")),
            "instruction": instruction,
        }
        texts = [self._text(query, document, instruction) for query, document in pairs]
        return task.EncodingJob(texts, options, self.wants_truncation(tensors))

    def _instruction(self, tensors: Tensors) -> str:
        """Return the request's own instruction, that of a prompt by its name, or the checkpoint's default."""
        if not (self.parameters.get("template") or {}).get("instructed"):
            return ""
        instruction = any_text(tensors, "instruction")
        if instruction is not None:
            if "prompt_name" in tensors:
                raise InputError("instruction and prompt_name both say what is asked; send one of them")
            return instruction
        return self.named_prompt(tensors)

    def _text(self, query: str, document: str, instruction: str) -> Text:
        template = self.parameters.get("template")
        if template is None:
            return query, document
        pieces = template["instructed"] if instruction else template["plain"]
        return render_pair(pieces, {"query": query, "document": document, "instruction": instruction})

    def _fit(self, job: task.EncodingJob, source: int, encoding: Encoding) -> task.Row:
        """Return the row of a pair; where it is cut, the end of its template replaces its last tokens.

        As sentence-transformers does (base/modules/transformer.py, _restore_chat_template_suffix, 6.2).
        """
        row = super()._fit(job, source, encoding)
        if not row.truncated or self.parameters.get("template") is None:
            return row
        first, second = self.text([self._text(text, text, job.options["instruction"]) for text in FILLERS])
        end = common_end(first.ids, second.ids)[-self.max_length :]
        ids = [*row.encoding.ids[: len(row.encoding) - len(end)], *end]
        cut = Window(ids, row.encoding.type_ids, row.encoding.attention_mask, 1.0)
        return task.Row(cast(Encoding, cut), source, truncated=True)

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        logits = np.stack([output["logits"] for output in outputs]).reshape(job.options["shape"])
        scores = FUNCTIONS[job.options["function"]](logits).astype(np.float32)
        return {"score": scores, "order": np.argsort(-scores, axis=-1, kind="stable").astype(np.int32)}
