"""Embed texts: one vector if the checkpoint pools its tokens, one vector a token if it does not.

A text that is longer than the model reads can be split into windows, whose vectors are joined into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from tokenizers import Encoding

from ...fields import Field, InputError, Tensors, any_text, choice, count, one_each
from .. import task
from ..late_chunks import chunks_of, joined
from ..windows import frame, split

CHUNKING = ("none", "mean", "max", "late")
STATES = "states"  # output of a graph whose tokens are pooled here: (rows, tokens, size)

POOLED_INPUTS = (
    Field("dimensions", "TYPE_INT32", optional=True),
    Field("chunking", "TYPE_STRING", optional=True),
    Field("chunk_overlap", "TYPE_INT32", optional=True),
)


def text_inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
    """Return the inputs of a text with its prompt, by name only if the checkpoint has prompts."""
    name = (Field("prompt_name", "TYPE_STRING", optional=True),) if parameters["prompts"] else ()
    return (Field("text_input", "TYPE_STRING"), *name, Field("prompt", "TYPE_STRING", optional=True))


class Task(task.Task):
    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (*text_inputs(parameters), *(POOLED_INPUTS if parameters["pooled"] else ()))

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("embedding", "TYPE_FP32", (-1,) if parameters["pooled"] else (-1, parameters["size"])),)

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts, prompt = one_each(tensors, "text_input"), self._prompt(tensors)
        options = {"prompt": len(prompt), **(self._pooled_options(tensors) if self.parameters["pooled"] else {})}
        options["skipped"] = self._prompt_tokens(prompt) if not self.parameters.get("include_prompt", True) else 0
        if options.get("chunking") != "late":
            return task.EncodingJob([prompt + text for text in texts], options, self.wants_truncation(tensors))
        if not self.parameters.get("late_chunking", False):
            raise InputError("chunking is 'late', and this model was built without it (--late-chunking): leave it out")
        document, options["ends"] = joined(prompt, texts)
        return task.EncodingJob([document], options, truncate=False)

    def _prompt_tokens(self, prompt: str) -> int:
        """Return how many tokens of a row are its prompt's, special tokens before it included.

        Raises InputError if they leave no token to a text.
        """
        if not prompt:
            return 0
        (encoding,) = self.text([prompt])
        if len(encoding) >= self.max_length:
            raise InputError(
                f"the prompt alone fills the model's limit ({len(encoding)} of {self.max_length} tokens), and this "
                "model's embedding leaves the prompt out: send a shorter prompt"
            )
        return len(encoding) - int(encoding.special_tokens_mask[-1])

    def _prompt(self, tensors: Tensors) -> str:
        """Return the text before each text: the request's own, by its name, or the checkpoint's default."""
        prompt = any_text(tensors, "prompt")
        if prompt is not None:
            if "prompt_name" in tensors:
                raise InputError("prompt and prompt_name both say what comes before a text; send one of them")
            return prompt
        return self.named_prompt(tensors)

    def _pooled_options(self, tensors: Tensors) -> dict[str, Any]:
        size, overlap = self.parameters["size"], self.max_length // 8
        return {
            "dimensions": count(tensors, "dimensions", size, maximum=size),
            "chunking": choice(tensors, "chunking", "none", CHUNKING),
            "overlap": count(tensors, "chunk_overlap", overlap, minimum=0),
        }

    def rows(self, job: task.EncodingJob, encodings: Sequence[Encoding]) -> list[task.Row]:
        """Return one row a text or, with chunking, one a window of a text that is too long."""
        chunking = job.options.get("chunking", "none")
        if chunking == "none":
            return super().rows(job, encodings)
        if chunking == "late":
            return [self._document(job)]
        return [row for source, encoding in enumerate(encodings) for row in self._windows(job, source, encoding)]

    def _windows(self, job: task.EncodingJob, source: int, encoding: Encoding) -> list[task.Row]:
        if len(encoding) <= self.max_length:
            return [task.Row(encoding, source)]
        whole = self.text.with_offsets(job.texts[source])
        first, last = frame(whole, job.options["prompt"])
        size, overlap = self.max_length - len(whole) + last - first, job.options["overlap"]
        if overlap >= size:
            raise InputError(
                f"chunk_overlap is {overlap}; beside its prompt and special tokens a window of this model has {size} "
                "tokens of the text: send a smaller chunk_overlap, or a shorter prompt"
            )
        windows = split(whole, job.options["prompt"], size, overlap)
        return [task.Row(cast(Encoding, window), source) for window in windows]

    def _document(self, job: task.EncodingJob) -> task.Row:
        """Return the one row of all texts, and note which text each of its tokens is of.

        Raises InputError for too many tokens, and for a text among others of which all tokens are special or the
        prompt's.
        """
        whole, ends = self.text.with_offsets(job.texts[0]), job.options["ends"]
        if len(whole) > self.max_length:
            raise InputError(
                f"the texts are one document (chunking is 'late') of {len(whole)} tokens; the limit of this model is "
                f"{self.max_length}: send fewer of them at once"
            )
        job.options["chunks"] = chunks_of(whole, ends)
        first, last = frame(whole, job.options["prompt"])
        empty = np.flatnonzero(np.bincount(job.options["chunks"][first:last], minlength=len(ends)) == 0)
        if len(ends) > 1 and len(empty):
            raise InputError(f"text_input, row {empty[0]}, has no token of its own; join it with the text beside it")
        return task.Row(whole, 0)

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        if self.parameters["pooled"]:
            if STATES in outputs[0]:
                vectors = self._pooled(job, rows, outputs)
            else:
                vectors = np.stack([output["features"] for output in outputs])
            if "chunks" not in job.options:
                vectors = self._joined(job, rows, vectors)
            return {"embedding": self._resized(vectors, job.options["dimensions"])}
        if len({len(row.encoding) for row in rows}) > 1:
            raise InputError(
                "the texts of this request have different numbers of tokens, so their features have no common "
                "shape; send one text a request"
            )
        return {"embedding": np.stack([o["features"][: len(row.encoding)] for o, row in zip(outputs, rows)])}

    def _pooled(self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]) -> np.ndarray:
        """Return the mean of each row's tokens, without those of its prompt if the checkpoint leaves them out.

        Of one document, return the mean of each text's tokens (texts, size).
        """
        chunks, skipped = job.options.get("chunks"), job.options["skipped"]
        if chunks is None:
            means = np.stack([_mean(one[STATES][skipped : len(row.encoding)]) for row, one in zip(rows, outputs)])
        else:
            states, chunks = outputs[0][STATES][skipped : len(chunks)], chunks[skipped:]
            means = np.stack([_mean(states[chunks == chunk]) for chunk in range(len(job.options["ends"]))])
        return self._scaled(means)[:, : self.parameters["size"]]

    def _joined(self, job: task.EncodingJob, rows: Sequence[task.Row], vectors: np.ndarray) -> np.ndarray:
        """Return one vector a text (texts, size) from one a row.

        The vector of several windows is their largest numbers or their mean, in which each token of the text has the
        same weight; it is scaled to length 1 if the checkpoint does so.
        """
        if len(rows) == len(job.texts):
            return vectors
        sources = np.array([row.source for row in rows])
        weights = np.array([getattr(row.encoding, "weight", 1.0) for row in rows], np.float32)
        texts = []
        for source in range(len(job.texts)):
            of_text = sources == source
            if of_text.sum() == 1:
                texts.append(vectors[of_text][0])
            elif job.options["chunking"] == "max":
                texts.append(self._scaled(vectors[of_text].max(axis=0)))
            else:
                texts.append(self._scaled(np.average(vectors[of_text], axis=0, weights=weights[of_text])))
        return np.stack(texts)

    def _resized(self, vectors: np.ndarray, dimensions: int) -> np.ndarray:
        """Return the first numbers of each vector, scaled again, in the order of sentence-transformers' encode().

        (encode(truncate_dim=..., normalize_embeddings=...), sentence_transformer/model.py, 6.2.)
        """
        return vectors if dimensions == vectors.shape[1] else self._scaled(vectors[:, :dimensions])

    def _scaled(self, vectors: np.ndarray) -> np.ndarray:
        """Return the vectors at length 1 if the checkpoint normalises its embeddings."""
        if not self.parameters.get("normalize", False):
            return vectors
        scaled: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return scaled

    @property
    def too_long(self) -> str:
        if not self.parameters["pooled"]:
            return super().too_long
        return "shorten the text, send truncate=true to have it cut, or chunking=mean to have all of it read in windows"


def _mean(states: np.ndarray) -> np.ndarray:
    """Return the mean of tokens' vectors (tokens, size); zero of none."""
    return states.sum(axis=0) / np.float32(max(len(states), 1))
