"""`build-repo compile`: the TensorRT plans of a repository, on the GPU that will serve them."""

from __future__ import annotations

import argparse

from builder.commands import REPOSITORY, screen
from builder.common.errors import RepositoryError
from builder.repository.report.record import read_report
from builder.repository.transaction import recover
from builder.repository.versions import rollback, served_number
from builder.runtime.recipe.compile import FOLDER, CompileError, compile_plan


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo compile",
        description="Compile the TensorRT plans of a repository on this GPU, compare each with ONNX Runtime's answers, "
        "and publish it. A plan that was compiled for this GPU and this TensorRT is kept.",
    )
    arguments.add_argument("repository", nargs="?", **REPOSITORY)
    return arguments


def run(options: argparse.Namespace) -> int:
    recover(options.repository)
    recipes = sorted(options.repository.glob(f"*/*/{FOLDER}/recipe.json"))
    if not recipes:
        raise RepositoryError(
            f"{options.repository} has no plan to compile; build a model for one: build-repo MODEL --target tensorrt"
        )
    for recipe in recipes:
        version = recipe.parent.parent
        name = f"{version.parent.name}, version {version.name}"
        try:
            with screen.status(f"compiling {name}"):
                fingerprint = compile_plan(recipe.parent)
        except CompileError as error:
            raise RepositoryError(str(error)) from error
        outcome = "is up to date"
        if fingerprint is not None:
            outcome = f"compiled for {fingerprint['gpu']} by TensorRT {fingerprint['tensorrt']}"
        screen.print(f"[green]✓[/] {name} {outcome}")
        if fingerprint is not None and int(version.name) > (served_number(version.parent) or 0):
            front = read_report(version.parent, version.name).name
            screen.print(f"  {front}: version {rollback(options.repository, front, int(version.name))} is served now")
    return 0
