"""onnxruntime-genai: WORK.json CHECKPOINT int4|fp32.

Its Generator for one request at a time; for more its Engine, which batches continuously.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
from clock import Clock


def main() -> None:
    work, checkpoint, kind = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    target = checkpoint / f"genai-{kind}"
    if not (target / "genai_config.json").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(target)]
        subprocess.run([*command, "-p", kind, "-e", "cpu", "-c", str(target / "cache")], check=True, stdout=sys.stderr)
    path = target / "genai_config.json"
    config = json.loads(path.read_text())
    options = config["model"]["decoder"].setdefault("session_options", {})
    options["intra_op_num_threads"] = work["threads"]
    config["engine"] = {"dynamic_batching": {"block_size": 256, "gpu_utilization_factor": 0.9, "max_batch_size": 16}}
    if work["concurrency"] == 1:
        del config["engine"]
    path.write_text(json.dumps(config))
    model = genai.Model(str(target))

    def serve_one_by_one(clock: Clock, requests: list[dict]) -> None:
        for name, request in enumerate(requests):
            params = genai.GeneratorParams(model)
            total = len(request["prompt"]) + request["new_tokens"]
            params.set_search_options(do_sample=False, max_length=total, min_length=total)
            clock.send(name)
            generator = genai.Generator(model, params)
            generator.append_tokens(np.array(request["prompt"], np.int32))
            for _ in range(request["new_tokens"]):
                generator.generate_next_token()
                clock.tokens(name)

    def serve_together(clock: Clock, requests: list[dict]) -> None:
        engine = genai.Engine(model)
        waiting, running = list(enumerate(requests)), {}
        while waiting or running:
            while waiting and len(running) < work["concurrency"]:
                name, entry = waiting.pop(0)
                params = genai.GeneratorParams(model)
                total = len(entry["prompt"]) + entry["new_tokens"]
                params.set_search_options(do_sample=False, max_length=total, min_length=total)
                request = genai.Request(params)
                request.add_tokens(np.array(entry["prompt"], np.int32))
                clock.send(name)
                running[name] = request
                engine.add_request(request)
            ready = engine.step()
            if ready is None:
                continue
            name = next(name for name, request in running.items() if request == ready)
            while ready.has_unseen_tokens():
                ready.get_unseen_token()
                clock.tokens(name)
            if ready.is_done():
                engine.remove_request(ready)
                del running[name]

    serve = serve_one_by_one if work["concurrency"] == 1 else serve_together
    serve(Clock(), [{**work["requests"][0], "new_tokens": 8}])
    clock = Clock()
    serve(clock, work["requests"])
    print(json.dumps(clock.figures()))


main()
