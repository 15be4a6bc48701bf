"""Builds of one checkpoint in several precisions that share the stages before the selection."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from builder.building import pipeline
from builder.building.families import Family, begin
from builder.building.families.encoder.results import VerifiedEncoder
from builder.building.pipeline import build
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import resolve
from builder.common.progress import Stage
from builder.options import BuildSpec
from builder.repository.report.record import BuildReport


class VerifiedOnce:
    """Checkpoint of `spec`, exported into `folder` and verified to answer as PyTorch does.

    If one of the builds calibrates or prunes, `spec` must too, so that the samples are split into those to fit and
    those to verify.
    """

    def __init__(self, spec: BuildSpec, folder: Path) -> None:
        family = begin(spec, resolve(spec), folder, lambda name: nullcontext())
        exported = family.export()
        reference = family.reference(exported)
        self.model = spec.model
        self.exact: Any = family.verify(family.fuse(exported), reference)

    def build(self, spec: BuildSpec) -> BuildReport:
        """Run `build(spec)` from the selection on."""
        assert spec.model == self.model
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "begin", self._begin)
            return build(spec)

    def _begin(self, spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> _FromSelection:
        exact = self.exact
        if isinstance(exact, VerifiedEncoder):
            exact = replace(exact, evaluator=replace(exact.evaluator, spec=spec))
        return _FromSelection(begin(spec, checkpoint, folder, stage), exact)


@dataclass(frozen=True)
class _FromSelection:
    """Family whose stages before the selection are done."""

    family: Family
    exact: Any

    def export(self) -> None: ...

    def reference(self, exported: None) -> None: ...

    def fuse(self, exported: None) -> None: ...

    def verify(self, fused: None, reference: None) -> Any:
        return self.exact

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)
