"""Open a retrieval library on a folder of sentence-transformers; each returns a function from requests to answers.

Requests are texts (embed) or {"query", "documents"} (rerank, and late for late interaction); answers are lists of
floats. It runs in the environment of the library.
Precisions: fp32, bf16, int8 (weights and activations) and int8-weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answers = Callable[[list[Any]], list[list[float]]]
SAMPLES = 64  # texts that measure the ranges of activations
ROWS = 32  # of a call, sentence-transformers' default
ARCHITECTURES = {"avx512_vnni": "qint8_avx512_vnni", "avx2": "quint8_avx2"}  # of int8: sentence-transformers' files
ARCHITECTURE = next(name for name in ARCHITECTURES if name in Path("/proc/cpuinfo").read_text())
ONNX = {"fp32": "model.onnx", "int8": f"model_{ARCHITECTURES[ARCHITECTURE]}.onnx"}
OPENVINO = {
    "fp32": "openvino/openvino_model.xml",
    "bf16": "openvino/openvino_model.xml",
    "int8": "openvino/openvino_model_int8.xml",
    "int8-weights": "openvino/openvino_model_int8_weights.xml",
}
GENAI = {"fp32": "genai-fp32", "bf16": "genai-fp32", "int8": "genai-int8-weights", "int8-weights": "genai-int8-weights"}


def sentence_transformers_onnx(kind: str, folder: Path, precision: str, threads: int) -> Answers:
    """Open sentence-transformers' ONNX backend on the files of `convert_to_onnx`."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    options = {"provider": "CPUExecutionProvider", "session_options": settings}
    return _answers(kind, _open(kind, folder, "onnx", {**options, "file_name": f"onnx/{ONNX[precision]}"}))


def convert_to_onnx(kind: str, folder: Path, precision: str) -> None:
    """Export with sentence-transformers; int8 is its own dynamic quantisation for this processor."""
    from sentence_transformers import export_dynamic_quantized_onnx_model

    if not (folder / "onnx" / ONNX["fp32"]).exists():
        _open(kind, folder, "onnx", {"export": True}).save_pretrained(str(folder))
    if not (folder / "onnx" / ONNX[precision]).exists():
        plain = _open(kind, folder, "onnx", {"file_name": f"onnx/{ONNX['fp32']}"})
        export_dynamic_quantized_onnx_model(plain, ARCHITECTURE, str(folder))


def sentence_transformers_openvino(kind: str, folder: Path, precision: str, threads: int) -> Answers:
    """Open sentence-transformers' OpenVINO backend on the files of `convert_to_openvino`."""
    options = {"ov_config": _openvino_options(precision, threads), "file_name": OPENVINO[precision]}
    return _answers(kind, _open(kind, folder, "openvino", options))


def sentence_transformers_openvino_dynamic(kind: str, folder: Path, precision: str, threads: int) -> Answers:
    """Open the same backend on 8-bit weights, with activations that OpenVINO rounds to 8 bits as it runs."""
    return sentence_transformers_openvino(kind, folder, "int8-weights", threads)


def _openvino_options(precision: str, threads: int) -> dict[str, Any]:
    """Return OpenVINO's properties; by default it rounds the inputs of products with 8-bit weights, in groups of 32."""
    multiplied = "bf16" if precision == "bf16" else "f32"
    return {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": multiplied}


def convert_to_openvino(kind: str, folder: Path, precision: str) -> None:
    """Export with sentence-transformers, and quantise with NNCF.

    int8: weights and activations by the ranges of samples; int8-weights: weights alone.
    """
    if not (folder / OPENVINO["fp32"]).exists():
        _open(kind, folder, "openvino", {"export": True}).save_pretrained(str(folder))
    if (folder / OPENVINO[precision]).exists():
        return
    import nncf
    import openvino

    model = _open(kind, folder, "openvino", {"file_name": OPENVINO["fp32"]})
    graph = openvino.Core().read_model(str(folder / OPENVINO["fp32"]))
    if precision == "int8-weights":
        reduced = nncf.compress_weights(graph)
    else:
        names = {port.get_any_name() for port in graph.inputs}
        rows = [dict(model.tokenizer(text, return_tensors="np")) for text in _work(folder)["texts"][:SAMPLES]]
        feeds = [{name: array for name, array in row.items() if name in names} for row in rows]
        reduced = nncf.quantize(graph, nncf.Dataset(feeds), model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(reduced, str(folder / OPENVINO[precision]), compress_to_fp16=False)


def convert_to_openvino_weights(kind: str, folder: Path, precision: str) -> None:
    """Export with sentence-transformers, and quantise weights alone with NNCF."""
    convert_to_openvino(kind, folder, "int8-weights")


def _work(folder: Path) -> dict[str, Any]:
    """Return the benchmark's texts and the pooling (mean, cls or lasttoken) of an embedder."""
    return json.loads((folder / "work.json").read_text())


def sentence_transformers_torch(kind: str, folder: Path, precision: str, threads: int) -> Answers:
    """Open sentence-transformers on PyTorch."""
    import torch

    torch.set_num_threads(threads)
    return _answers(kind, _open(kind, folder, "torch", {"dtype": "bfloat16" if precision == "bf16" else "float32"}))


def _open(kind: str, folder: Path, backend: str, options: dict[str, Any]) -> Any:
    import sentence_transformers

    names = {"embed": "SentenceTransformer", "rerank": "CrossEncoder", "late": "MultiVectorEncoder"}
    opened = getattr(sentence_transformers, names[kind])
    return opened(str(folder), device="cpu", backend=backend, model_kwargs=options)


def _answers(kind: str, model: Any) -> Answers:
    if kind == "embed":
        return lambda texts: model.encode(texts, batch_size=ROWS, show_progress_bar=False).tolist()
    if kind == "rerank":
        return lambda requests: _ranked(requests, lambda pairs: model.predict(pairs, show_progress_bar=False).tolist())

    def rank(requests: list[dict[str, Any]]) -> list[list[float]]:
        answers = []
        for request in requests:
            query = model.encode_query([request["query"]], show_progress_bar=False)
            documents = model.encode_document(request["documents"], batch_size=ROWS, show_progress_bar=False)
            answers.append(model.similarity(query, documents)[0].tolist())
        return answers

    return rank


def _ranked(requests: list[dict[str, Any]], score: Callable[[list[tuple[str, str]]], list[float]]) -> list[list[float]]:
    """Score the pairs of all requests in one call."""
    scores = iter(score([(request["query"], text) for request in requests for text in request["documents"]]))
    return [[next(scores) for _ in request["documents"]] for request in requests]


def fastembed(kind: str, folder: Path, precision: str, threads: int) -> Answers:
    """Open FastEmbed on the files of `convert_to_onnx`."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="m",
        pooling=PoolingType[_work(folder)["pooling"].upper()],
        normalization=True,
        sources=ModelSource(hf="local/m"),
        dim=json.loads((folder / "config.json").read_text())["hidden_size"],
        model_file=f"onnx/{ONNX[precision]}",
    )
    model = TextEmbedding("m", specific_model_path=str(folder), threads=threads)
    return lambda texts: [vector.tolist() for vector in model.embed(texts, batch_size=ROWS)]


def openvino_genai(kind: str, folder: Path, precision: str, threads: int) -> Answers:
    """Open openvino-genai's pipelines on a folder that `convert_for_genai` wrote."""
    import openvino_genai as genai

    options = _openvino_options(precision, threads)
    converted = str(folder / GENAI[precision])
    if kind == "rerank":
        config = genai.TextRerankPipeline.Config()
        config.top_n, config.padding_side = 1000, "left"
        ranker, tokenizer = genai.TextRerankPipeline(converted, "CPU", config, **options), genai.Tokenizer(converted)

        def pair(query: str, document: str) -> str:
            """Return the text of a pair by the checkpoint's template, which the pipeline does not apply."""
            turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return tokenizer.apply_chat_template(turns, add_generation_prompt=False)

        def rank(request: dict[str, Any]) -> list[float]:
            texts = [pair(request["query"], document) for document in request["documents"]]
            return [score for _, score in sorted(ranker.rerank("", texts))]

        return lambda requests: [rank(request) for request in requests]
    config = genai.TextEmbeddingPipeline.Config()
    pooling, types = _work(folder)["pooling"], genai.TextEmbeddingPipeline.PoolingType
    config.pooling_type = {"mean": types.MEAN, "cls": types.CLS, "lasttoken": types.LAST_TOKEN}[pooling]
    if pooling == "lasttoken":
        config.padding_side = "left"
    embedder = genai.TextEmbeddingPipeline(converted, "CPU", config, **options)
    return lambda texts: embedder.embed_documents(texts)


def convert_for_genai(kind: str, folder: Path, precision: str) -> None:
    """Convert a folder for openvino-genai, by Optimum's command line."""
    target = folder / GENAI[precision]
    if target.exists():
        return
    task = "feature-extraction" if kind == "embed" else "text-generation"
    bits = "int8" if precision.startswith("int8") else "fp32"
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(folder)]
    subprocess.run([*command, "--task", task, "--weight-format", bits, str(target)], check=True, stdout=sys.stderr)


LIBRARIES = {
    "sentence-transformers ONNX": sentence_transformers_onnx,
    "sentence-transformers OpenVINO": sentence_transformers_openvino,
    "sentence-transformers OpenVINO dynamic": sentence_transformers_openvino_dynamic,
    "sentence-transformers PyTorch": sentence_transformers_torch,
    "FastEmbed": fastembed,
    "openvino-genai": openvino_genai,
}


CONVERTERS = {
    "sentence-transformers ONNX": convert_to_onnx,
    "sentence-transformers OpenVINO": convert_to_openvino,
    "sentence-transformers OpenVINO dynamic": convert_to_openvino_weights,
    "FastEmbed": convert_to_onnx,
    "openvino-genai": convert_for_genai,
}


if __name__ == "__main__":
    CONVERTERS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), sys.argv[4])
