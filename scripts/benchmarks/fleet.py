"""Many models: `scripts/bench fleet builds` (building them), `serving` (on demand), `loads`, `shared` (front)."""

from __future__ import annotations

import importlib
import sys

PARTS = ("builds", "serving", "loads", "shared")


def main() -> None:
    part, *arguments = sys.argv[1:] or [""]
    if part not in PARTS:
        sys.exit(f"usage: scripts/bench fleet {'|'.join(PARTS)} [options]")
    importlib.import_module(f"scripts.benchmarks.fleet_{part}").main(arguments)


if __name__ == "__main__":
    main()
