"""openvino-genai's ContinuousBatchingPipeline: WORK.json CHECKPOINT int8|int4|int8-lookup.

Weights in that many bits, converted by Optimum; the KV cache in its default 8 bits. With "lookup" it guesses 5 tokens
after up to 3 equal ones, as its sample prompt_lookup_decoding_lm. It runs in this process, without a server and text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from clock import Clock

CACHE_GB = 2
EXPORTING = {"granitemoehybrid": "5.5.4"}  # transformers that optimum-intel exports an architecture with, if not 5.2
WARM_UP = 512  # tokens of a prompt


def convert(checkpoint: Path, kind: str) -> Path:
    target = checkpoint / f"openvino-{kind}"
    if (target / "openvino_tokenizer.xml").exists():
        return target
    named = checkpoint / "tokenizer_config.json"  # this older transformers does not know newer class names
    written = json.loads(named.read_text())
    named.write_text(json.dumps({**written, "tokenizer_class": "PreTrainedTokenizerFast"}))
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(checkpoint)]
    command += ["--task", "text-generation-with-past", "--weight-format", kind]
    if kind == "int4":
        command += ["--group-size", "128", "--ratio", "1.0"]
    architecture = json.loads((checkpoint / "config.json").read_text())["model_type"]
    environment = (
        {**os.environ, "PYTHONPATH": exporting(EXPORTING[architecture])} if architecture in EXPORTING else None
    )
    subprocess.run([*command, str(target)], check=True, stdout=sys.stderr, env=environment)
    return target


def exporting(version: str) -> str:
    """Return the folder of another transformers beside that of this environment; loaded at its first use."""
    folder = Path(sys.prefix) / f"transformers-{version}"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"transformers=={version}"], check=True, stdout=sys.stderr)
    return str(folder)


def main() -> None:
    work, checkpoint, kind = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = work["concurrency"]
    scheduler.enable_prefix_caching = False  # no request of this work begins as another does
    weights, _, guessing = kind.partition("-")
    properties = {"INFERENCE_NUM_THREADS": work["threads"], **({"prompt_lookup": True} if guessing else {})}
    pipe = genai.ContinuousBatchingPipeline(str(convert(checkpoint, weights)), scheduler, "CPU", properties)

    def serve(requests: list[dict]) -> Clock:
        """Run clients that send one request after the other."""
        clock, waiting, running = Clock(), list(enumerate(requests)), {}
        while waiting or running:
            while waiting and len(running) < work["concurrency"]:
                name, request = waiting.pop(0)
                options = genai.GenerationConfig()
                options.max_new_tokens = options.min_new_tokens = request["new_tokens"]
                options.ignore_eos, options.do_sample = True, False
                if guessing:
                    options.num_assistant_tokens, options.max_ngram_size = 5, 3
                clock.send(name)
                ids = openvino.Tensor(np.array([request["prompt"]], np.int64))
                running[name] = (pipe.add_request(name, ids, options), request["new_tokens"])
            pipe.step()
            for name, (handle, wanted) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        wanted -= len(output.generated_ids)
                        clock.tokens(name, len(output.generated_ids))
                running[name] = (handle, wanted)
                if wanted <= 0:
                    del running[name]
        return clock

    requests = work["requests"]
    serve([{"prompt": requests[0]["prompt"][:WARM_UP], "new_tokens": 8}])
    print(json.dumps(serve(requests).figures()))


main()
