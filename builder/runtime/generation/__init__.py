"""Text generation inside Triton: requests in, a continuous batch over a fixed cache, text out as it comes.

options -> engine (admission, prefill, decode) -> sampling -> text. The engine knows token ids and an executor; only
`model.py` beside this folder knows Triton.
"""
