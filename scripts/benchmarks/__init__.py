"""Benchmarks: one module each, run as `scripts/bench NAME`."""
