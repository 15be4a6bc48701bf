"""Load models on demand: a repository may hold more models than memory, and a model is loaded at its first request.

`repository_models` lists the models, `memory_estimate` and `processes` estimate and measure their memory,
`memory_budget` grants it; `resident_models` keeps leases on the loaded ones, `lifecycle` and `loader` load and unload
them, and `backend` stands between a request and Triton.
"""
