"""Tables of the architectures that are served, and of those refused with their reasons: docs/architectures.json.

The product builds each one in a process of its own. The emitted code of the published repository then runs on rows past
windows and up to the last position, together in batches, and is compared with PyTorch's model on each row alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from builder.building.families import encoder
from builder.building.pipeline import build
from builder.building.variants import evaluator, timing
from builder.checkpoints.libraries import quiet_libraries
from builder.checkpoints.model import position_limit
from builder.checkpoints.tasks import find_task
from builder.common.errors import BuilderError
from builder.common.samples import TEXTS
from builder.common.tensors import to_tensors
from builder.engines import infer_with
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.graph import read_graph
from builder.options import make_spec
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.generation.service import Service
from scripts.tiny_models import DRAFTS, GENERATING, HEADS, POSITIONS, architectures, load, make_checkpoint, tiny_model
from tests.assistants import make_assistant

FILE = Path(__file__).parent.parent / "docs" / "architectures.json"
FOLDER = re.compile(r"\S*/architectures-\w+/")
LATER = "not run yet: scripts/architectures"
LIMIT_S = 240  # of processor time for one model; niced, on a busy machine, it takes much longer
HUNG_S = 3600
TOLERANCE = 1e-3  # of the largest output of an encoder; of a token's log-probability
TIE = 1e-3
NEW_TOKENS = 16
OUTCOMES = ("verified", "refused", "wrong", "not tried")
NO_REASON = re.compile(r"worth reporting|Exception summary|torch\.onnx\.export|traceback", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """Outcome of one head of one architecture.

    verified: built, and the served answers equal PyTorch's within `error`; refused: by a BuilderError, whose first line
    is `reason`; wrong: anything else that the product did; not tried: no tiny model can be created here.
    """

    head: str
    model_type: str
    outcome: str
    reason: str = ""
    error: float | None = None


class Differs(Exception):
    """The emitted service and PyTorch answer differently."""


def tried(head: str, model_type: str, folder: Path) -> Row:
    """Create, build and compare one model in `folder`."""
    try:
        checkpoint = make_checkpoint(head, DRAFTS.get(model_type, model_type), folder / "checkpoint")
        draft = make_assistant(folder / "draft", load(head, checkpoint), model_type) if model_type in DRAFTS else None
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    except Exception as error:  # transformers' own: a package that is missing
        return Row(head, model_type, "not tried", _first_line(error))
    try:
        model: PreTrainedModel | None = load(head, checkpoint)
    except Exception as error:  # transformers' own; what it does not load, the product must refuse
        model, unloaded = None, error
    try:
        warning = _built(head, checkpoint, model and position_limit(model), tokenizer, folder, draft)
        if model is None:
            return Row(head, model_type, "wrong", f"built, and transformers does not load it: {_first_line(unloaded)}")
        compare = _generated if head in GENERATING else _encoded
        return Row(head, model_type, "verified", warning, float(f"{compare(head, model, tokenizer, folder):.0e}"))
    except Differs as error:
        return Row(head, model_type, "wrong", f"served, and not what PyTorch answers: {error}")
    except BuilderError as error:
        outcome = "wrong" if NO_REASON.search(str(error)) else "refused"
        return Row(head, model_type, outcome, _first_line(error))
    except Exception as error:  # a traceback
        return Row(head, model_type, "wrong", f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return FOLDER.sub("", lines[0])[:400] if lines else type(error).__name__


def _built(head: str, checkpoint: Path, positions: int | None, tokenizer: Any, folder: Path, draft: Path | None) -> str:
    """Build the checkpoint as the product does, without timing anything; return its warnings.

    `draft`: what is tried, with the checkpoint as the model that it drafts for.
    """
    longest = min(positions or POSITIONS, POSITIONS)
    texts = [*TEXTS[:3], _text(tokenizer, longest - 8)]
    samples = folder / "samples.jsonl"
    masked = "[MASK] " if head == "MASKED_LM" else ""
    samples.write_text("".join(json.dumps({"text_input": masked + text}) + "\n" for text in texts), "utf-8")
    spec = make_spec(
        model=str(checkpoint),
        task=HEADS[head],
        name="model",
        output=folder / "repository",
        samples=samples,
        max_length=None if positions else POSITIONS,
        threads=1,
        **({"slots": 2} if head in GENERATING else {}),
        **({} if draft is None else {"draft": str(draft), "engine": "onnxruntime"}),
    )
    with ExitStack() as untimed:
        for module, name in (
            (timing, "pytorch_decoder_latencies"),
            (timing, "decoder_latencies"),
            (encoder, "pytorch_latencies"),
            (evaluator, "engine_latencies"),
        ):
            untimed.enter_context(patch.object(module, name, lambda *_: {}))
        warnings = build(spec).warnings
    of_draft = () if draft is None else (f"as the --draft of a {load(head, checkpoint).config.model_type}",)
    return "; ".join((*of_draft, *warnings))


def _text(tokenizer: PreTrainedTokenizerFast, tokens: int, first: str = "") -> str:
    """Return `first` and the project's texts, cut to `tokens` tokens, special ones included."""
    words = " ".join(reversed(TEXTS)).split(" ")
    count = 1
    while len(tokenizer(first + " ".join(words[: count + 1]))["input_ids"]) <= tokens:
        count += 1
    text = first + " ".join(words[:count])
    while len(tokenizer(f"{text} a")["input_ids"]) <= tokens:
        text += " a"
    return text


def _encoded(head: str, model: PreTrainedModel, tokenizer: Any, folder: Path) -> float:
    """Return the largest difference between the engine's outputs in the emitted front's batch and each row alone."""
    front = folder / "repository" / "model" / "1"
    infer = infer_with(read_graph(front / "model.onnx"), 1)
    calls: list[tuple[dict[str, np.ndarray], Mapping[str, np.ndarray]]] = []

    def recorded(feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        calls.append((feeds, infer(feeds)))
        return calls[-1][1]

    pipeline = Pipeline(front, recorded)
    longest = pipeline.serving.max_length
    first = "[MASK] " if head == "MASKED_LM" else ""
    texts = [_text(tokenizer, length, first) for length in (6, 20, 45, longest - 1, longest)]
    fields = find_task(HEADS[head]).fields(pipeline.serving.parameters)
    for answer in pipeline([to_tensors({"text_input": text}, fields[0]) for text in texts]):
        if isinstance(answer, Exception):
            raise Differs(f"the emitted code fails: {answer!r}")
    return max(
        row_error(model, feeds, outputs, at) for feeds, outputs in calls for at in range(len(feeds["input_ids"]))
    )


def row_error(
    model: PreTrainedModel, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], at: int
) -> float:
    length = int(feeds["attention_mask"][at].sum()) if "attention_mask" in feeds else feeds["input_ids"].shape[1]
    row = {
        name: torch.from_numpy(values[at : at + 1, :length]) for name, values in feeds.items() if name != "positions"
    }
    row["attention_mask"] = torch.ones((1, length), dtype=torch.long)
    fresh = copy.deepcopy(model)  # some change themselves as they run
    with torch.no_grad():
        expected = fresh(**row).logits[0].numpy()
    actual = outputs["logits"][at]
    if "positions" in feeds:
        expected = expected[feeds["positions"][at]]
    elif expected.ndim > 1:
        actual = actual[:length]
    if expected.shape != actual.shape:
        raise Differs(f"a row of {length} tokens has outputs {actual.shape}, PyTorch's are {expected.shape}")
    error = float(np.abs(actual - expected).max() / max(1e-6, np.abs(expected).max()))
    if not error <= TOLERANCE:
        raise Differs(f"a row of {length} tokens in a batch of {len(feeds['input_ids'])} is off by {error:.0e}")
    return error


def _generated(head: str, model: PreTrainedModel, tokenizer: Any, folder: Path) -> float:
    """Return the largest difference of a log-probability over answers up to the last position; check greedy text."""
    service = Service(folder / "repository" / "model" / "1")
    longest = service.serving.arena.length
    prompts = [_text(tokenizer, length) for length in (3, 14, 40, longest - NEW_TOKENS)]
    service.loop.start()
    try:
        answers = [_answer(service, prompt) for prompt in prompts]
        outcomes = [wait() for wait in answers]
    finally:
        service.loop.stop()
    errors = [0.0]
    for prompt, answer in zip(prompts, outcomes, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        tokens = [entry["token"] for entry in answer]
        with torch.no_grad():
            logits = copy.deepcopy(model)(input_ids=torch.tensor([ids + tokens]), use_cache=False).logits[0].double()
        steps = torch.log_softmax(logits[len(ids) - 1 : -1], dim=-1)
        chosen = steps.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        if float((steps.max(dim=-1).values - chosen).max()) > TIE:
            raise Differs(f"greedy text after {len(ids)} tokens is not PyTorch's best")
        errors.append(float(max(abs(float(a) - b["logprob"]) for a, b in zip(chosen, answer, strict=True))))
        if not errors[-1] <= TOLERANCE:
            raise Differs(f"log-probabilities after {len(ids)} tokens are off by {errors[-1]:.0e}")
    return max(errors)


def _answer(service: Service, prompt: str) -> Any:
    """Ask for greedy text with its log-probabilities; return a function that waits for the answer."""
    done, answers = threading.Event(), []

    def respond(answer: Any, last: bool) -> None:
        answers.append(answer)
        if last:
            done.set()

    options = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
    service.submit({"text_input": np.array([prompt.encode()], np.object_)}, options, respond)

    def wait() -> Any:
        if not done.wait(LIMIT_S) or isinstance(answers[-1], Exception):
            raise Differs(f"the emitted service fails: {answers[-1:]!r}")
        return json.loads(answers[-1]["logprobs_output"][0])

    return wait


def _in_a_process(head: str, model_type: str) -> Row:
    """Run `tried` in a silent process of its own with a time limit."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="architectures-") as folder:
        process = context.Process(target=_child, args=(head, model_type, Path(folder), sender))
        process.start()
        sender.close()
        try:
            if not receiver.poll(HUNG_S):
                return Row(head, model_type, "wrong", f"not done after {HUNG_S} s")
            row: Row = receiver.recv()
            return row
        except EOFError:
            process.join()
            slow = process.exitcode == -signal.SIGXCPU
            why = f"not done after {LIMIT_S} s of a processor" if slow else f"the process died ({process.exitcode})"
            return Row(head, model_type, "wrong", why)
        finally:
            process.kill()
            process.join()


def _warm_up() -> None:
    """Export once before the processes fork: the modules of a first export would cost each of them seconds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        export_decoder(tiny_model("CAUSAL_LM", "llama"), Path(folder), POSITIONS)


def _child(head: str, model_type: str, folder: Path, sender: Any) -> None:
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, resource.RLIM_INFINITY))
    sender.send(tried(head, model_type, folder))


def read_table() -> dict[tuple[str, str], Row]:
    """Return the rows of the file that were run with this version of transformers."""
    if not FILE.exists():
        return {}
    document = json.loads(FILE.read_text("utf-8"))
    if document["transformers"] != transformers.__version__:
        return {}
    return {(row["head"], row["model_type"]): Row(**row) for row in document["rows"] if row["reason"] != LATER}


def write_table(rows: Mapping[tuple[str, str], Row]) -> None:
    """Write one row a line in the order of heads and names; list models that were not run as such."""
    keys = [(head, model_type) for head in HEADS for model_type in architectures(head)]
    listed = [rows.get(key, Row(*key, "not tried", LATER)) for key in keys]
    lines = ",\n".join(f"  {json.dumps(asdict(row), ensure_ascii=False)}" for row in listed)
    beside = FILE.with_suffix(".new")
    beside.write_text(f'{{"transformers": "{transformers.__version__}", "rows": [\n{lines}\n]}}\n', "utf-8")
    beside.replace(FILE)


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/architectures")
    parser.add_argument("--only", nargs="+", metavar="MODEL_TYPE", help="these model types, again")
    parser.add_argument("--redo", nargs="?", const="", choices=("", *OUTCOMES), help="again: all, or of one outcome")
    options = parser.parse_args()
    _warm_up()
    rows = read_table()
    for head in HEADS:
        for model_type in architectures(head):
            known = rows.get((head, model_type))
            again = options.redo is not None and options.redo in ("", known.outcome if known else "")
            wanted = again or known is None if options.only is None else model_type in options.only
            if not wanted:
                continue
            start = time.perf_counter()
            row = rows[head, model_type] = _in_a_process(head, model_type)
            write_table(rows)
            print(
                f"{head:24}{model_type:24}{row.outcome:10}{time.perf_counter() - start:6.1f} s  {row.reason[:150]}",
                flush=True,
            )
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(row.outcome for row in rows.values()).items()))


if __name__ == "__main__":
    main()
