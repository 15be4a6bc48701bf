"""Every option of a model, with its meaning and its default; which go together is in build_spec.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from builder.common.addresses import store_address
from builder.common.engines import ENGINES
from builder.common.releases import NEWEST, RELEASES
from builder.options.sections import VLLM, Calibration, Gpu, Load, Options, TensorRT, TensorRTLLM
from builder.options.serving import Machine, Serving

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[(*(name for name, facts in ENGINES.items() if facts.targets), "auto")]

KEEP = 3  # versions: the one that is served, and two to roll back to


class Choices(Options):
    """Options of one model. A field with a `flag` is also an option of the command line."""

    model: str
    """Hub id, or a local folder of transformers or sentence-transformers."""
    task: str | None = Field(None, json_schema_extra={"flag": True})
    """Task to serve, such as text-classification. Default: inferred from the checkpoint."""
    name: str | None = Field(None, json_schema_extra={"flag": True})
    """Name of the model in Triton; a build under the name of a model that is there becomes its next version. Default:
    the last part of MODEL, and then a model that was built from another checkpoint is refused."""
    output: Path = Field(Path("model_repository"), json_schema_extra={"flag": True})
    """Model repository to publish into, or an object store to push to: s3://, gs://, az:// or file:// and a path; or a
    registry: oci://REGISTRY/REPOSITORY, which is for one model, and :N for version N."""
    keep: int = Field(KEEP, ge=1, json_schema_extra={"flag": True})
    """Versions of the model that remain there, the new one included: first the one that was served until then, to which
    a rollback returns.
    """
    store: str | None = None
    """Object store or registry that the model is pushed to, instead of a folder: `output`, where that is an address."""
    revision: str | None = Field(None, json_schema_extra={"flag": True})
    """Branch, tag or commit on the Hugging Face Hub. Default: main."""
    precision: Literal["fp32", "fp16", "bf16", "int8", "int8-static", "int8-weights", "int4-weights", "fp8", "auto"] = (
        Field("fp32", json_schema_extra={"flag": True})
    )
    """Numeric precision. int8: weights and activations in 8 bits, with activation ranges computed at run time.
    int8-static, fp8: activation ranges measured on the samples. int8-weights, int4-weights: weights in blocks; on a CPU
    products round what they multiply them by to 8 bits, in the same blocks. auto: measure several and serve the
    fastest that meets --quality or --budget."""
    engine: EngineName | None = Field(None, json_schema_extra={"flag": True})
    """Engine that runs the graph. auto: the faster of ONNX Runtime and OpenVINO, measured on this machine. vllm:
    nothing is exported; Triton's vLLM backend runs the checkpoint. Default: the first engine that supports the
    precision; with --precision auto, all are measured."""
    level: Literal["O1", "O2", "O3", "O4"] = Field("O2", json_schema_extra={"flag": True})
    """Graph optimisation level, numbered as in Optimum. O1: basic; O2: fusions; O3: O2 with an approximate GELU;
    O4: O3 in fp16."""
    graph: Path | None = Field(None, json_schema_extra={"flag": True})
    """An ONNX graph to serve as it is instead of exporting the checkpoint, for example from quantisation-aware training
    or AITune: a file, a folder with model.onnx, or a model of a Triton repository. Encoders only."""
    prune: float | None = Field(None, gt=0, lt=1, json_schema_extra={"flag": True})
    """Share of the attention heads and feed-forward neurons to remove, those that matter least on the samples.
    Encoders only."""
    quality: float | None = Field(None, ge=0, le=1, json_schema_extra={"flag": True})
    """Lowest acceptable mean agreement with PyTorch on the samples; nothing is published below it. Default: the
    task's own threshold."""
    budget: str | None = Field(None, json_schema_extra={"flag": True})
    """Most that a measure on --data may lose against PyTorch, as a share or as a number: "accuracy -0.5%", "spearman
    -0.01". It takes the place of --quality. Encoders only."""
    data: Path | None = Field(None, json_schema_extra={"flag": True})
    """Labelled rows for --budget, in a file or folder as build-repo evaluate reads it. Nothing is fitted to them."""
    perplexity: float = Field(1.05, ge=1, json_schema_extra={"flag": True})
    """Highest acceptable perplexity on the samples, as a ratio to PyTorch's. Generating models only."""
    block_size: int | None = Field(None, json_schema_extra={"flag": True})
    """Weights that share one scale in int8-weights and int4-weights: 16, 32, 64, 128 or 256. Default: 32, but 128 for
    encoders in int8-weights, which run faster so."""
    asymmetric: bool = Field(False, json_schema_extra={"flag": True})
    """Store a zero point with each block of int8-weights and int4-weights."""
    slots: int = Field(16, ge=1, le=512, json_schema_extra={"flag": True})
    """Sequences that are decoded at once; memory is reserved for --max-length tokens of each, but where they share
    it (--cache-gb). With --target cuda and --gpu 64, or as many as the card has memory for, unless it is given.
    Generating models only."""
    beams: int | None = Field(None, ge=1, le=64, json_schema_extra={"flag": True})
    """Most beams of one request. Default: the checkpoint's own number, or --slots for a decoder."""
    max_answer: int | None = Field(None, ge=2, json_schema_extra={"flag": True})
    """Most tokens in an answer of an encoder-decoder model. Default: the checkpoint's own limit, or 256."""
    cache: Literal["fp32", "fp16", "int8"] = Field("fp32", json_schema_extra={"flag": True})
    """Precision of the key-value cache of a decoder on the CPU. fp16 is for --engine openvino; int8 of ONNX Runtime
    needs 1.31 or later in Triton's Python."""
    cache_gb: float | None = Field(None, gt=0, json_schema_extra={"flag": True})
    """Memory of the key-value cache, in 10^9 bytes, which all sequences share as they grow. Decoders with --engine
    openvino, where the default is enough for --slots texts of --max-length, but no more than half of the memory; and
    with --target cuda, where each sequence has memory of its own without it, and --gpu or machine.gpus must name the
    card. Without --slots the default is half of the memory that the weights leave on a T4, and four fifths of it where
    another card has no memory for 64 slots."""
    executor: Literal["in-process", "bls"] = Field("in-process", json_schema_extra={"flag": True})
    """Where the graph runs. in-process: inside the Python model NAME, which updates a decoder's cache in place. bls: in
    a separate Triton model NAME_model, called through Triton's business logic scripting (BLS); an encoder on a GPU
    always runs there."""
    samples: Path | None = Field(None, json_schema_extra={"flag": True})
    """File with one JSON object a line, each a request of the task, to verify and calibrate on; labels may be
    added."""
    draft: str | None = Field(None, json_schema_extra={"flag": True})
    """Hub id or local folder of a smaller decoder with the same tokeniser, of an EAGLE-3 draft or a Gemma 4 assistant
    for the model, or of the model itself if it has a layer for multi-token prediction, which guesses tokens ahead; the
    text stays the same. Text generation on the CPU only."""
    adapters: int = Field(0, ge=0, le=512, json_schema_extra={"flag": True})
    """LoRA adapters that may answer at once, each request with its own; build-repo adapter adds and removes them. Text
    generation, and in fp32 embeddings, classification and rerankers, with ONNX Runtime on the CPU only."""
    adapter_rank: int = Field(16, ge=1, le=512, json_schema_extra={"flag": True})
    """Highest rank of an adapter; memory is reserved for it in each."""
    adapter_labels: int | None = Field(None, ge=1, le=4096, json_schema_extra={"flag": True})
    """Maximum number of labels of a classifier's adapter. With it, the checkpoint may lack a head; each request must
    then name an adapter. Default: as many as the checkpoint has."""
    adapter_layers: str | None = Field(None, json_schema_extra={"flag": True})
    """Layers that adapters may change, by the last parts of their names: q_proj,v_proj. Fewer layers take less memory
    and time. Default: every linear layer that reads whole texts, except the output matrix."""
    target: Literal["cpu", "cuda", "tensorrt"] = Field("cpu", json_schema_extra={"flag": True})
    """Hardware to serve on. tensorrt: a plan that is compiled later on the GPU machine; with --engine
    onnxruntime, ONNX Runtime's TensorRT provider compiles while the model loads."""
    triton: str = Field(NEWEST, json_schema_extra={"flag": True})
    """Triton release that the repository must load and answer correctly on. Default: the newest known one."""
    max_batch_size: int = Field(64, ge=1, json_schema_extra={"flag": True})
    """Most requests that the front model takes in one batch."""
    max_queue_delay_us: int = Field(0, ge=0, json_schema_extra={"flag": True})
    """Microseconds that a request may wait for others to share a batch. 0: requests batch only while the model is
    busy."""
    instances: int = Field(1, ge=1, json_schema_extra={"flag": True})
    """Engine instances that run in parallel, each with its share of the cores."""
    threads: int | None = Field(None, ge=1, json_schema_extra={"flag": True})
    """Threads of each engine instance. Default: cores / instances; 1 on a GPU."""
    max_length: int | None = Field(None, ge=3, json_schema_extra={"flag": True})
    """Most tokens of one text, or of prompt and answer together for text generation. Default: the checkpoint's own
    limit."""
    truncate: bool = Field(False, json_schema_extra={"flag": True})
    """Cut texts that are too long and set `truncated` in the answer, instead of refusing them."""
    pooling: Literal["cls", "mean", "max", "lasttoken"] | None = Field(None, json_schema_extra={"flag": True})
    """How token vectors become one embedding, for checkpoints that do not say."""
    late_chunking: bool = Field(False, json_schema_extra={"flag": True})
    """Let requests to an embedding model with mean pooling say chunking=late: their texts are read as one document, and
    each gets the mean of its own tokens. The graph then returns a vector a token, which the front pools."""
    serving: Serving = Serving()
    """Queueing, batching and scheduling."""
    machine: Machine = Machine()
    """The machine that serves, where it is another one."""
    load: Load | None = None
    """Requests that the model must answer; build-repo plan reads them."""
    calibration: Calibration = Calibration()
    """How activation ranges are measured."""
    gpu: Gpu = Gpu()
    """Devices and their memory."""
    tensorrt: TensorRT = TensorRT()
    """Profiles and limits of TensorRT."""
    vllm: VLLM = VLLM()
    """Arguments for vLLM."""
    tensorrt_llm: TensorRTLLM = TensorRTLLM()
    """Arguments for TensorRT-LLM."""

    @model_validator(mode="before")
    @classmethod
    def _engines_have_targets(cls, options: Any) -> Any:
        """Set the target of an engine that does not run on the CPU."""
        if not isinstance(options, dict) or "target" in options:
            return options
        engine = ENGINES.get(str(options.get("engine")))
        if engine is None or not engine.targets or "cpu" in engine.targets:
            return options
        return {**options, "target": engine.targets[0]}

    @model_validator(mode="before")
    @classmethod
    def _stores_are_no_folders(cls, options: Any) -> Any:
        address = store_address(options["output"]) if isinstance(options, dict) and "output" in options else None
        if address is None:
            return options
        return {**{name: value for name, value in options.items() if name != "output"}, "store": address}

    @field_validator("gpu", mode="before")
    @classmethod
    def _card_alone(cls, gpu: Any) -> Any:
        return {"card": gpu} if isinstance(gpu, str) else gpu

    @field_validator("triton")
    @classmethod
    def _known_release(cls, release: str) -> str:
        if release not in RELEASES:
            raise ValueError(f"Triton {release} is not known; known are {', '.join(RELEASES)}")
        return release

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, size: int | None) -> int | None:
        if size not in (None, 16, 32, 64, 128, 256):
            raise ValueError("a block holds 16, 32, 64, 128 or 256 inputs")
        return size
