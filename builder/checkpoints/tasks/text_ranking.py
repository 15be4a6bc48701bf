"""Relevance of documents to a query, by a cross-encoder: a classification head, or two tokens of a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint, CheckpointFiles
from builder.checkpoints.cross_encoder import load_cross_encoder
from builder.checkpoints.distances import PairedNumbers, difference, paired_scores
from builder.checkpoints.metrics import list_agreement, rank_correlation, score_ranking
from builder.checkpoints.model import is_causal
from builder.checkpoints.pair_template import chat_reading, pair_pieces, read_without_special_tokens
from builder.checkpoints.rankers import PairRanker, Ranker
from builder.checkpoints.sentence_transformers.kinds import CROSS_ENCODER
from builder.checkpoints.sentence_transformers.modules import LogitScore
from builder.checkpoints.tasks.base import (
    Answer,
    Sample,
    TaskGraph,
    find_auto_class,
    head_size,
    model_class_names,
    once_a_checkpoint,
)
from builder.checkpoints.tasks.text_classification import TextClassification
from builder.common.errors import CheckpointError
from builder.common.samples import MORE_TEXTS, TEXTS

SAVED = ("sentence_transformers", "sbert_ce_default_activation_function")  # keys of a cross-encoder's config.json
FUNCTIONS = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.Identity": "none",
}


CAUSAL = "text-generation"  # the head of a causal language model
TRIED = 8  # lists in which a text is looked for, to see whether a template is right
FOUND = 1  # place of the query's text in a list of `_graded`
OTHERS = (0, 4, 5, 6, 7)  # places of texts without a word of it


def _graded(texts: Sequence[str], at: int, count: int) -> Sample:
    """Return the first half of a text as a query, and `count` documents from that text on to others.

    Of documents alone that are about other things the order means little, and rounding changes it most.
    """
    words = texts[at].split()
    query, rest = (" ".join(part) for part in (words[: len(words) // 2], words[len(words) // 2 :]))
    others = [texts[(at + step) % len(texts)] for step in range(1, count - 2)]
    return {"query": query, "documents": [others[0], texts[at], rest, f"{others[1]} {query}", *others[1:]]}


class TextRanking(TextClassification):
    name = "text-ranking"
    has_class_scores = False
    precedence = 3
    rows_begin_alike = True
    metric = "rank correlation"
    threshold = 0.97
    min_ranking: ClassVar[Mapping[str, float]] = {"recall@10": 0.85}
    labels = ("relevance",)
    samples = tuple(_graded(TEXTS, at, 8) for at in range(20))
    more_samples = tuple(_graded(MORE_TEXTS, at, 20) for at in range(0, 60, 5))

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        by_a_cross_encoder = saved_by == CROSS_ENCODER or any(hasattr(config, key) for key in SAVED)
        if saved_by == CROSS_ENCODER and is_language_model(config):
            return True
        return super().claims(config, saved_by) and by_a_cross_encoder and config.num_labels == 1

    def prepare(self, files: CheckpointFiles) -> CheckpointFiles:
        """Read pairs through the chat template where sentence-transformers does; score tokens of a language model."""
        reading = chat_reading(files)
        if reading is not None:
            pieces = pair_pieces(files, reading)  # refuses another template before anything takes long
            if files.sentence is not None and files.sentence.default_prompt and pieces["instructed"] is None:
                raise CheckpointError(
                    f"{files.source} has a default prompt, which its chat template does not write; remove "
                    "default_prompt_name from config_sentence_transformers.json, or write the role system"
                )
            read_without_special_tokens(files.tokenizer)
        scores_tokens = bool(files.sentence and files.sentence.of(LogitScore)) or is_language_model(files.config)
        return replace(files, task=LogitRanking()) if scores_tokens else files

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        self.check_head(checkpoint)
        reading, sentence = chat_reading(checkpoint), checkpoint.sentence
        own: dict[str, Any] = {"function": self._function(checkpoint)}
        if reading is None:
            return own
        return {
            **own,
            "template": pair_pieces(checkpoint, reading),
            "prompts": sentence.prompts if sentence else {},
            "default_prompt": sentence.default_prompt if sentence else None,
        }

    def check_head(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError for a head that does not answer a relevance."""
        outputs = head_size(checkpoint)
        if outputs != 1:
            raise CheckpointError(f"text-ranking needs a head with one output, a relevance; this one has {outputs}")

    def _function(self, checkpoint: Checkpoint) -> str:
        """Return the activation that sentence-transformers' CrossEncoder saved, a sigmoid where it saved none.

        Its places, the first that is there (cross_encoder/model.py, 6.2): config_sentence_transformers.json, then
        `sentence_transformers` of config.json (from 4.0), then `sbert_ce_default_activation_function` (before).
        """
        config, sentence = checkpoint.config, checkpoint.sentence
        newer, older = (getattr(config, key, None) for key in SAVED)
        name = sentence.activation if sentence is not None else None
        if name is None:
            name = newer["activation_fn"] if newer and "activation_fn" in newer else older
        function = "sigmoid" if name is None else FUNCTIONS.get(name)
        if function is None:
            raise CheckpointError(
                f"the cross-encoder's activation {name} is not known; known are {', '.join(sorted(FUNCTIONS))}"
            )
        return function

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return the scores of sentence-transformers' CrossEncoder, from one pair at a time."""
        encoder = once_a_checkpoint("cross-encoder", lambda: load_cross_encoder(checkpoint))
        prompt = {
            key: sample[name] for name, key in (("instruction", "prompt"), ("prompt_name",) * 2) if name in sample
        }
        function = sample.get("function_to_apply", self._function(checkpoint))
        activation = torch.nn.Sigmoid() if function == "sigmoid" else torch.nn.Identity()
        pairs = [(sample["query"], document) for document in sample["documents"]]
        scores = encoder.predict(pairs, batch_size=1, activation_fn=activation, show_progress_bar=False, **prompt)
        return {"score": scores.tolist(), "order": np.argsort(-scores, kind="stable").tolist()}

    def doubts(self, checkpoint: Checkpoint, answered: Sequence[tuple[Sample, Answer]] = ()) -> str | None:
        """Return a warning about a causal model that may not read pairs as it was trained to; None for others.

        Without its template such a reranker orders documents almost at random. A text has to be more relevant to
        its own beginning than other texts are, or as relevant, in `TRIED` of the task's own samples or more.
        """
        if not is_causal(checkpoint.model):
            return None
        own = [(sample, answer) for sample, answer in answered if sample in self.samples]
        if len(own) < TRIED:
            own = [(sample, self.reference(checkpoint, sample)) for sample in self.samples[:TRIED]]
        found = sum(answer["score"][FOUND] >= max(answer["score"][at] for at in OTHERS) for _, answer in own)
        weak = found <= len(own) // 2
        if chat_reading(checkpoint) is not None and not weak:
            return None
        lacks = "it has no chat template, so it reads query and document one after the other; "
        chance = f"{len(own) / (len(OTHERS) + 1):.1f} by chance"
        ranked = f"{found} of {len(own)} texts rank first for their beginning among {len(OTHERS) + 1} ({chance})"
        return (
            f"the ranking may be random: {lacks if chat_reading(checkpoint) is None else ''}{ranked}. If the model was "
            "trained with a template, write that as chat_template.jinja into the checkpoint, with the roles query and "
            "document, and build it again"
        )

    def agreement(self, expected: Answer, actual: Answer) -> float:
        """Return Spearman's rank correlation of the scores."""
        return rank_correlation(expected["score"], actual["score"])

    def ranking(self, expected: Sequence[Answer], actual: Sequence[Answer]) -> dict[str, float]:
        """Compare which documents of each list are the best."""
        return list_agreement(*([answer["score"] for answer in side] for side in (expected, actual)))

    def difference(self, expected: Answer, actual: Answer) -> tuple[float, str]:
        """Compare the scores, which the order follows from: near ties may change places."""
        return difference({"score": expected["score"]}, actual)

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        return {"the score of a document": paired_scores(expected["score"], actual["score"])}

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `relevance`, a number for each document."""
        return score_ranking([sample["relevance"] for sample in samples], [answer["score"] for answer in answers])

    def ranker(self, checkpoint: Checkpoint) -> Ranker | None:
        return PairRanker()


class LogitGraph(TaskGraph):
    """Relevance (batch, 1) of the tokens `score` after the last token of each row, which is padded on the right.

    The base model's features are cut to that token, and the head to the rows of the two tokens: the graph computes no
    other logit. The model's own code after its head, such as a soft cap of logits, stays.
    """

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], score: LogitScore) -> None:
        super().__init__(model, inputs, ("logits",))
        tokens = [score.true] if score.false is None else [score.true, score.false]
        head: Any = model.get_output_embeddings()
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.register_buffer("weight", head.weight.detach()[tokens].clone())
        self.register_buffer("bias", None if head.bias is None else head.bias.detach()[tokens].clone())

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        last = tensors["attention_mask"].sum(dim=1, keepdim=True).long() - 1

        def keep_last(module: Any, arguments: Any, output: Any) -> Any:
            output["last_hidden_state"] = output[0].gather(1, last.unsqueeze(-1).expand(-1, -1, output[0].shape[-1]))
            return output

        def score(module: Any, arguments: Any, output: Any) -> torch.Tensor:
            return torch.nn.functional.linear(arguments[0], self.weight, self.bias)

        head: Any = self.model.get_output_embeddings()
        with self.model.base_model.register_forward_hook(keep_last), head.register_forward_hook(score):
            logits = self.model(**tensors, use_cache=False).logits[:, 0]
        return (logits if logits.shape[-1] == 1 else logits[:, :1] - logits[:, 1:],)


class LogitRanking(TextRanking):
    """Ranking by the logits of tokens such as yes and no; sentence-transformers' LogitScore."""

    head = CAUSAL

    def check_head(self, checkpoint: Checkpoint) -> None:
        self._score(checkpoint)

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        return LogitGraph(checkpoint.model, inputs, self._score(checkpoint))

    def _score(self, checkpoint: Checkpoint) -> LogitScore:
        """Return the tokens of the checkpoint's LogitScore; yes and no without one, as the library takes them then."""
        saved = checkpoint.sentence.of(LogitScore) if checkpoint.sentence else []
        score = saved[0] if saved else LogitScore(*(_token(checkpoint, word) for word in ("yes", "no")))
        vocabulary = checkpoint.config.vocab_size
        wrong = [token for token in (score.true, score.false) if token is not None and not 0 <= token < vocabulary]
        if wrong:
            raise CheckpointError(f"LogitScore reads token {wrong[0]}; the model has tokens up to {vocabulary - 1}")
        return score


def _token(checkpoint: Checkpoint, word: str) -> int:
    token = checkpoint.tokenizer.convert_tokens_to_ids(word)
    if not isinstance(token, int) or token == checkpoint.tokenizer.unk_token_id:
        raise CheckpointError(
            f"{checkpoint.source} has no token {word!r} to score; save it with sentence-transformers' CrossEncoder and "
            "a LogitScore of its own tokens"
        )
    return token


def is_language_model(config: PreTrainedConfig) -> bool:
    """Return True if the checkpoint was saved with the head of a causal language model."""
    names = model_class_names(find_auto_class(CAUSAL)).values()
    return any(name in names for name in config.architectures or [])


TASK = TextRanking()
