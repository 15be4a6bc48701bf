"""llama.cpp: WORK.json CHECKPOINT TYPE, with TYPE Q8_0 or Q4_0.

A continuous batch over its own batch interface, in this process: without a server and text, so faster than its server
would be.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np
from clock import Clock
from safetensors.numpy import load_file

BATCH = 512


def convert(checkpoint: Path, kind: str) -> Path:
    """Convert the checkpoint to GGUF, all matrices in `kind`; the output matrix of Q4_0 in Q6_K is left to Q8_0."""
    path = checkpoint / f"{kind}.gguf"
    if path.exists():
        return path
    config = json.loads((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    arch = {"gpt2": "gpt2", "llama": "llama", "qwen3": "qwen3"}[config["model_type"]]
    quantised = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(str(path), arch)
    if arch == "gpt2":
        layers, hidden, heads, keys = config["n_layer"], config["n_embd"], config["n_head"], config["n_head"]
        writer.add_context_length(config["n_positions"])
        writer.add_feed_forward_length(4 * hidden)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        size = config.get("head_dim") or hidden // heads
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(size)
        writer.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(7 if kind == "Q8_0" else 2)

    def add(name: str, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, dtype=np.float32)
        if values.ndim == 1 or "position" in name:
            writer.add_tensor(name, values)
        else:
            own = gguf.GGMLQuantizationType.Q8_0 if "token_embd" in name else quantised
            writer.add_tensor(name, gguf.quants.quantize(values, own), raw_dtype=own)

    def pairs(values: np.ndarray, count: int) -> np.ndarray:  # halves to neighbours, as this rotation requires
        return values.reshape(count, 2, values.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(values.shape)

    get = {name.removeprefix("transformer.").removeprefix("model."): value for name, value in weights.items()}
    if arch == "gpt2":
        add("token_embd.weight", get["wte.weight"])
        add("position_embd.weight", get["wpe.weight"])
        for part in ("weight", "bias"):
            add(f"output_norm.{part}", get[f"ln_f.{part}"])
        names = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
        names |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
        for layer in range(layers):
            for theirs, name in names.items():
                for part in ("weight", "bias"):
                    add(f"blk.{layer}.{name}.{part}", get[f"h.{layer}.{theirs}.{part}"].T)
    else:
        add("token_embd.weight", get["embed_tokens.weight"])
        add("output_norm.weight", get["norm.weight"])
        names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}
        names |= {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate"}
        names |= {"post_attention_layernorm": "ffn_norm", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
        if arch == "qwen3":
            names |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
        for layer in range(layers):
            for theirs, name in names.items():
                values = get[f"layers.{layer}.{theirs}.weight"]
                if arch == "llama" and name in ("attn_q", "attn_k"):
                    values = pairs(values, heads if name == "attn_q" else keys)
                add(f"blk.{layer}.{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    work, checkpoint, kind = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    model = llama.llama_model_load_from_file(str(convert(checkpoint, kind)).encode(), settings)
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
    serve([(requests[0][0], 8)])
    clock, generated = serve(requests)
    print(json.dumps({**clock.figures(), "sample": generated[0][:8]}))


main()
