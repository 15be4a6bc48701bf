"""Many models: plan the builds of a models.yaml, and run them at once on workers that may die without harm.

`--workers N` builds in N processes here (processes.py), `--workers ray` on a Ray cluster (ray.py). Each is an
`Executor` (executor.py), and each has its workers call `run_job` (work.py).
"""
