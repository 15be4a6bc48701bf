"""llama.cpp: WORK.json CHECKPOINT TYPE, with TYPE Q8_0 or Q4_0.

A continuous batch over its own batch interface, in this process: without a server and text, so faster than its server
would be.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import llama_cpp as llama
import numpy as np
from clock import Clock

BATCH = 512
WARM_UP = 512  # tokens of a prompt


def convert(checkpoint: Path, kind: str) -> Path:
    """Convert the checkpoint to GGUF by llama.cpp's own program, all matrices in `kind`."""
    path = checkpoint / f"{kind}.gguf"
    if path.exists():
        return path
    sys.path[:0] = [str(source()), str(source() / "gguf-py")]
    import conversion.base
    import convert_hf_to_gguf

    conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # it knows published ones
    written, first = path.with_suffix(".part"), "Q8_0" if kind == "Q8_0" else "BF16"
    sys.argv = ["convert_hf_to_gguf", str(checkpoint), "--outtype", first.lower(), "--outfile", str(written)]
    if json.loads((checkpoint / "config.json").read_text())["model_type"] == "qwen3_5_text":
        sys.argv.append("--no-mtp")  # the checkpoint has no layer for multi-token prediction
    convert_hf_to_gguf.main()
    if first == kind:
        written.rename(path)
    else:
        options = llama.llama_model_quantize_default_params()
        options.ftype, options.pure = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
        if llama.llama_model_quantize(str(written).encode(), str(path).encode(), ctypes.byref(options)):
            raise SystemExit(f"llama_model_quantize failed for {written}")
        written.unlink()
    return path


def source() -> Path:
    """Return the folder of llama.cpp's sources, which llama-cpp-python's archive contains; loaded at its first use."""
    folder = Path(sys.prefix) / "source"
    if not folder.exists():
        package = f"llama-cpp-python=={llama.__version__}"
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
            subprocess.run([*command, "--dest", scratch, package], check=True, stdout=sys.stderr)
            with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
                archive.extractall(scratch, filter="data")
            shutil.move(next(Path(scratch).glob("*/vendor/llama.cpp")), folder)
    return folder


def main() -> None:
    work, checkpoint, kind = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    model = llama.llama_model_load_from_file(str(convert(checkpoint, kind)).encode(), settings)
    if not model:
        raise SystemExit(f"llama.cpp does not load the converted {checkpoint.name}")
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    slots, length = work["concurrency"], work["max_length"]
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = slots * length, BATCH, BATCH, slots
    options.flash_attn_type, options.kv_unified = 1, slots > 1  # the fastest of the four here
    options.n_threads = options.n_threads_batch = work["threads"]
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(BATCH, 0, 1)

    def serve(requests: list[tuple[list[int], int]]) -> tuple[Clock, list[list[int]]]:
        """Run `slots` clients that each send one request after the other."""
        clock, waiting, running, generated = Clock(), list(enumerate(requests)), {}, [[] for _ in requests]

        def step(members: list[int]) -> None:
            """Run one call: the pending tokens of `members`, then a token for each whose prompt is complete."""
            wanted, size = {}, 0
            for slot in members:
                state = running[slot]
                piece = state[1][: BATCH - size]
                for offset, token in enumerate(piece):
                    batch.token[size], batch.pos[size] = token, state[2] + offset
                    batch.n_seq_id[size], batch.seq_id[size][0] = 1, slot
                    batch.logits[size] = offset == len(state[1]) - 1
                    wanted.update({slot: size} if batch.logits[size] else {})
                    size += 1
                state[1], state[2] = state[1][len(piece) :], state[2] + len(piece)
            batch.n_tokens = size
            if size and llama.llama_decode(context, batch):
                raise SystemExit("llama_decode failed")
            for slot, index in wanted.items():
                state = running[slot]
                pointer = llama.llama_get_logits_ith(context, index)
                token = int(np.ctypeslib.as_array(pointer, (vocabulary,)).argmax())
                clock.tokens(state[0])
                generated[state[0]].append(token)
                state[1] = [token]
                if len(generated[state[0]]) == state[3]:
                    llama.llama_memory_seq_rm(llama.llama_get_memory(context), slot, -1, -1)
                    del running[slot]

        while waiting or running:
            for slot in range(slots):
                if waiting and slot not in running:
                    index, (prompt, count) = waiting.pop(0)
                    clock.send(index)
                    running[slot] = [index, list(prompt), 0, count]
            for slot in [slot for slot, state in running.items() if len(state[1]) > 1 or not state[2]]:
                step([slot])  # prompts in calls of their own: mixed with answers, its batches split badly
            step([slot for slot, state in running.items() if len(state[1]) == 1])
        return clock, generated

    requests = [(r["prompt"], r["new_tokens"]) for r in work["requests"]]
    serve([(requests[0][0][:WARM_UP], 8)])
    clock, generated = serve(requests)
    print(json.dumps({**clock.figures(), "sample": generated[0][:8]}))


main()
