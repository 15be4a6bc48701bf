"""Drive a model of generation with AIPerf, the successor of genai-perf, over `/v1/completions` of a gateway.

Knows AIPerf's command line and its report, `profile_export_aiperf.json`: ai-dynamo/aiperf 0.13.0,
src/aiperf/exporters/metrics_json_exporter.py and src/aiperf/metrics/types.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from builder.common.distribution import installing
from builder.common.errors import ServeError
from builder.serving.client.client import Client
from builder.serving.load.figures import ClientFigures, StreamLatency
from builder.serving.load.traffic import Level
from builder.serving.server.process import end_group

PROGRAM = "aiperf"
INSTALLING = "uv tool install aiperf==0.13.0"  # an environment of its own: it pins an older psutil than this project
OFFLINE = "HF_HUB_OFFLINE"  # with it, AIPerf takes no folder for a tokenizer; without it, it asks no hub for one
TEXT, STREAM = "text_input", "stream"


def missing() -> str | None:
    """Return the command that installs what is missing to drive models with AIPerf, or None."""
    if shutil.which(PROGRAM) is None:
        return INSTALLING
    return None if find_spec("uvicorn") else installing("gateway")


def is_completion(client: Client, samples: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all samples stream the answer to a text, and `/v1/completions` takes their other inputs."""
    from builder.serving.gateway.generation.fields import RESERVED_INPUTS  # needs the extra gateway

    fields = {name for sample in samples for name in sample} - {TEXT, STREAM}
    is_streamed = client.signature.streams and all(sample.get(STREAM) for sample in samples)
    return is_streamed and all(TEXT in sample for sample in samples) and not fields & RESERVED_INPUTS


def drive(
    gateway: str,
    model: str,
    samples: Sequence[Mapping[str, Any]],
    level: Level,
    seconds: float,
    seed: int,
    folder: Path,
    limit_s: float,
) -> ClientFigures:
    """Send `samples` in their order to `model` at the address `gateway` for `seconds`; return AIPerf's figures.

    `seed` draws the times of a rate's requests; `folder` takes AIPerf's files. Raises ServeError if AIPerf fails,
    does not end within `limit_s`, or the gateway refuses a request.
    """
    data = folder / f"{model}.requests.jsonl"
    data.write_text("".join(f"{json.dumps(_request(sample))}\n" for sample in samples), "utf-8")
    results = folder / f"{model}.aiperf"
    command = [PROGRAM, "profile", "--model", model, "--url", gateway, "--endpoint-type", "completions", "--streaming"]
    command += ["--input-file", str(data), "--custom-dataset-type", "single_turn"]
    command += ["--dataset-sampling-strategy", "sequential", "--use-server-token-count", "--random-seed", str(seed)]
    command += ["--benchmark-duration", f"{seconds:g}", "--artifact-dir", str(results), "--ui", "none"]
    command += ["--tokenizer", str(_tokenizer(folder / f"{model}.tokenizer")), "--no-server-metrics"]
    command += ["--no-gpu-telemetry"]
    if level.kind == "rate":
        command += ["--request-rate", f"{level.value:g}", "--warmup-request-count", "1"]
    else:
        command += ["--concurrency", f"{level.value:g}", "--warmup-request-count", f"{level.value:g}"]
    environment = {name: value for name, value in os.environ.items() if name != OFFLINE}
    environment["TMPDIR"] = str(folder)  # AIPerf does not remove the folder of its sockets
    output = folder / f"{model}.aiperf.log"
    with output.open("w") as log:  # without preexec_fn, for its fork waits for the calls of gRPC, sometimes for ever
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired as error:
        raise ServeError(f"AIPerf did not end within {limit_s:.0f} s; ask {model} with build-repo query") from error
    finally:
        end_group(process)
    report = results / "profile_export_aiperf.json"
    if not report.is_file():
        text = [line for line in output.read_text("utf-8", errors="replace").splitlines() if line.strip()]
        lines = [line for line in text if "ERROR" in line] or text
        raise ServeError(f"AIPerf ended with status {status}: {lines[-1] if lines else 'it said nothing'}")
    return from_report(json.loads(report.read_text("utf-8")))


def _request(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of AIPerf's input: the text, and the other inputs as fields of the request."""
    extra = {name: value for name, value in sample.items() if name not in (TEXT, STREAM)}
    return {"text": sample[TEXT], "extra": extra}


def _tokenizer(folder: Path) -> Path:
    """Write a tokenizer that knows no word. AIPerf loads one in any case, and here the server counts the tokens."""
    folder.mkdir(exist_ok=True)
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def from_report(report: Mapping[str, Any]) -> ClientFigures:
    """Read a report. Raises ServeError if requests failed, or none was answered with text."""
    errors = report.get("error_summary") or []
    if errors:
        message, count = errors[0]["error_details"]["message"], sum(error["count"] for error in errors)
        raise ServeError(f"{count} requests failed, the first with: {message}")
    if "time_to_first_token" not in report:
        raise ServeError("no stream ended while AIPerf measured: measure for longer (--seconds)")
    latency, first = report["request_latency"], report["time_to_first_token"]
    between = report.get("inter_token_latency", {"p50": 0.0, "p99": 0.0})  # answers of one token have none
    tokens = report["output_token_throughput"]["avg"]
    stream = StreamLatency(first["p50"], first["p99"], between["p50"], between["p99"], tokens)
    return ClientFigures(report["request_throughput"]["avg"], latency["p50"], latency["p90"], latency["p99"], stream)
