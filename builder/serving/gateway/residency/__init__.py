"""Load models on demand: a repository may hold more models than memory, and a model is loaded at its first request.

`repository_models` lists the models, `memory` estimates and measures their memory, and `memory_budget` grants it.
`resident_models` decides when to load and unload a model, `loader` does it, and `backend` stands between a request and
Triton.
"""
