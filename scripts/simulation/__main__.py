"""A fleet at scale: `scripts/simulate` runs the gateway's routing over simulated Tritons."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict, fields
from pathlib import Path

from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.simulation.fleet import Scenario, simulate


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=simulate.__doc__)
    for option in fields(Scenario):
        kind = type(option.default)
        parser.add_argument(f"--{option.name}", type=kind, default=option.default, help=f"default {option.default}")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    given = vars(parser.parse_args())
    output = given.pop("output")
    scenario = Scenario(**given)
    logging.disable(logging.WARNING)  # of each server that a gateway finds ready
    figures = simulate(scenario)
    print(json.dumps(figures, indent=1))
    write_figures(output, {**circumstances(), "scenario": asdict(scenario), "figures": figures})


if __name__ == "__main__":
    main()
