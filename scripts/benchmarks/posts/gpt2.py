"""GPT-2: the cache, the tokeniser, the fused and quantised engine, together (post 1); the cache's traffic (post 2)."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from builder.building.pipeline import build
from builder.common.machine import available_cores
from builder.common.samples import TEXTS
from builder.engines.onnxruntime import run_with
from builder.options import make_spec
from builder.runtime.contract import load_generation
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.service import Service
from scripts.benchmarks import peers
from scripts.benchmarks.generators import make_checkpoint
from scripts.benchmarks.posts import Row, alone, median_ms

PROMPT, ANSWER = 32, 224
CONTEXT = 256


def accelerated_inference(folder: Path, environments: Path) -> list[Row]:
    """Continue a text of 32 tokens by 224, one client, greedy; tokens a second from text to text."""
    checkpoint = make_checkpoint("gpt2", folder / "gpt2")
    for precision in ("fp32", "int8"):
        _build(checkpoint, folder, precision)
    none = alone(_generate, checkpoint, False)
    cached = alone(_generate, checkpoint, True)
    ours = {precision: alone(_serve, folder / precision / "model" / "1") for precision in ("fp32", "int8")}
    slow = peers.run("tokenizer_peer", environments, _texts(folder), checkpoint / "tokenizer.json")
    fast = alone(_tokenise, checkpoint, folder)
    rows = [
        Row("PyTorch without cache", f"{none:.1f} tokens/s", 1.0),
        Row("with cache", f"{cached:.1f} tokens/s", cached / none, "10x"),
        Row("fused engine, fp32", f"{ours['fp32']:.1f} tokens/s", ours["fp32"] / none),
        Row("fused engine, int8", f"{ours['int8']:.1f} tokens/s", ours["int8"] / none, "10x over the cache alone"),
    ]
    forgetful, remembering = slow["without_cache_ms"], slow["with_cache_ms"]
    rows += [
        Row("slow tokeniser, no word cached", f"{forgetful:.2f} ms for 200 words", 1.0),
        Row("slow tokeniser, words cached", f"{remembering:.2f} ms", forgetful / remembering),
        Row("fast tokeniser", f"{fast:.2f} ms", forgetful / fast, "10x"),
    ]
    before = ANSWER / none + forgetful / 1000
    together = ANSWER / ours["int8"]
    rows.append(Row("all together", f"{together:.2f} s an answer, not {before:.2f}", before / together, "100x"))
    return rows


def onnx_runtime(folder: Path, environments: Path) -> list[Row]:
    """Measure one more token after 256: the time of each way to run GPT-2, and the bytes besides attention's."""
    checkpoint = make_checkpoint("gpt2", folder / "gpt2")
    _build(checkpoint, folder, "fp32")
    without, with_cache = alone(_pytorch_step, checkpoint)
    version = folder / "fp32" / "model" / "1"
    again = alone(_prefill, version)
    designs = alone(_cache_designs, version)
    rows = [
        Row("PyTorch, no cache", f"{without:.1f} ms", 1.0),
        Row("PyTorch, cache", f"{with_cache:.1f} ms", without / with_cache, "no gain on small outputs"),
        Row("ONNX Runtime, no cache", f"{again:.1f} ms", without / again),
    ]
    for title, name in (
        ("ONNX Runtime, cache, session.run", "numpy"),
        ("ONNX Runtime, cache, I/O binding", "binding"),
        ("ONNX Runtime, cache in place", "in place"),
    ):
        moved, ms = designs[name]
        rows.append(Row(title, f"{ms:.1f} ms, {moved / 1e6:.2f} MB moved", without / ms))
    return rows


def _build(checkpoint: Path, folder: Path, precision: str) -> None:
    if (folder / precision).exists():
        return
    build(
        make_spec(
            model=str(checkpoint),
            name="model",
            output=folder / precision,
            precision=precision,
            max_length=768,
            slots=16,
            quality=0.0,  # random weights have none to lose
            perplexity=1e9,
        )
    )


def _prompt(checkpoint: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return str(tokenizer.decode(tokenizer(" ".join(TEXTS))["input_ids"][:PROMPT]))


def _generate(checkpoint: Path, cached: bool) -> float:
    torch.set_num_threads(available_cores())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(_prompt(checkpoint), return_tensors="pt")["input_ids"]

    def run(count: int) -> None:
        limits = {"max_new_tokens": count, "min_new_tokens": count}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=cached, **limits)

    run(4)
    start = time.perf_counter()
    run(ANSWER)
    return ANSWER / (time.perf_counter() - start)


def _serve(version: Path) -> float:
    """Measure the emitted decode loop in this process."""
    service = Service(version)
    service.loop.start()
    prompt = _prompt(version.parent.parent.parent / "gpt2")

    def run(count: int) -> None:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        values = {
            "text_input": np.array([prompt.encode()], np.object_),
            "max_tokens": np.array([count], np.int32),
            "ignore_eos": np.array([True]),
        }
        service.submit(values, {}, lambda answer, last: answers.put(answer))
        answers.get(timeout=120)

    run(4)
    start = time.perf_counter()
    run(ANSWER)
    rate = ANSWER / (time.perf_counter() - start)
    service.loop.stop()
    return rate


def _pytorch_step(checkpoint: Path) -> tuple[float, float]:
    torch.set_num_threads(available_cores())
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.arange(CONTEXT + 1)[None] + 100
    with torch.inference_mode():
        without = median_ms(lambda: model(ids, use_cache=False, logits_to_keep=1))
        past = model(ids[:, :-1], use_cache=True).past_key_values

        def step() -> None:
            model(ids[:, -1:], past_key_values=past, use_cache=True)
            past.crop(-1)

        return without, median_ms(step)


def _cache_designs(version: Path) -> dict[str, tuple[int, float]]:
    """Return the bytes moved besides attention's reading, and the milliseconds, of a step after CONTEXT tokens.

    The designs are numpy in and out, I/O binding with a new cache each step, and a cache that is updated in place.
    """
    executor = _executor_of(version)
    session = executor.session
    position = sum(2 * heads * size * 4 for heads, size in executor.geometry.layers)  # bytes that one token adds
    feeds = {
        "input_ids": np.array([[5]]),
        "position_ids": np.array([[CONTEXT]]),
        "seqlens_k": np.array([CONTEXT], np.int32),
        "total_sequence_length": np.array([CONTEXT + 1], np.int32),
        "logits_positions": np.zeros(1, np.int64),
    }
    feeds |= {f"past_{n}": np.ascontiguousarray(t[:1, :, :CONTEXT]) for n, t in executor.arena.items()}
    naive, binding = run_with(session), session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}

    def bound() -> None:
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in executor.arena:
            binding.bind_output(f"present_{name}", "cpu")
        binding.bind_output("logits", "cpu")
        session.run_with_iobinding(binding)

    tokens, lengths = np.array([[5]]), np.array([CONTEXT])
    return {
        "numpy": (4 * position * CONTEXT, median_ms(lambda: naive(feeds))),
        "binding": (2 * position * CONTEXT, median_ms(bound)),
        "in place": (position, median_ms(lambda: executor.run(0, tokens, lengths))),
    }


def _executor_of(version: Path) -> InProcess:
    """Return the emitted executor over a published model's graph."""
    serving = load_generation(version)
    layers = Geometry.pairs(serving.arena.layers)
    return InProcess(version / "model.onnx", Geometry(16, 768, serving.vocabulary, layers), serving.session)


def _prefill(version: Path) -> float:
    executor = _executor_of(version)
    tokens = np.arange(CONTEXT + 1)[None] + 100
    return median_ms(lambda: executor.run(0, tokens, np.array([0])))


def _texts(folder: Path) -> Path:
    path = folder / "texts.txt"
    path.write_text(" ".join(" ".join(TEXTS).split()[:200]))
    return path


def _tokenise(checkpoint: Path, folder: Path) -> float:
    tokenizer, text = AutoTokenizer.from_pretrained(checkpoint), _texts(folder).read_text()
    return median_ms(lambda: tokenizer(text)["input_ids"])
