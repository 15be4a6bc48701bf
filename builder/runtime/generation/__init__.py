"""Generate text inside Triton: continuous batching over a fixed cache, with streamed answers.

options -> decode loop (admission, prefill, decode) -> sampling -> text. The decode loop knows token ids and an
executor; only `model.py` beside this folder knows Triton.
"""
