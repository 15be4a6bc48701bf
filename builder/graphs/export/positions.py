"""Give a model the positions of its tokens, which the decode loop counts from 0 for each row.

Most models take `position_ids`, which start at 0, or after a padding row (`first_position`). Others take none, and add
as many rows of a table as the text has tokens. Knows modules by the names of their position tables; knows no
architecture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from builder.checkpoints.model import POSITION_TABLES
from builder.common.errors import ExportError

PROBE = torch.tensor([[5, 6, 7]])  # token ids
Hook = Callable[[torch.nn.Module, tuple[object, ...], Any], torch.Tensor | None]


def table_rows(model: PreTrainedModel) -> dict[str, int] | None:
    """Return the row for a text's first token of each position table of `model`, by the name of its module.

    Returns None for a model that takes `position_ids` instead. Raises ExportError for one that counts otherwise.
    """
    if _takes_positions(model):
        _refuse_other_starts(model)
        return None
    rows: dict[str, int] = {}
    unknown: list[str] = []
    tables = list(_tables(model))

    def hook(name: str) -> Hook:
        def compare(module: torch.nn.Module, arguments: tuple[object, ...], output: Any) -> None:
            first = _first_row(getattr(module, "weight", None), output)
            if first is None:
                unknown.append(name)
            else:
                rows[name] = first

        return compare

    with torch.no_grad(), _hooked(model, {name: hook(name) for name in tables}):
        model(input_ids=PROBE, use_cache=True)
    if unknown or (tables and not rows):
        raise ExportError(
            f"it takes no position_ids, and its {(unknown or tables)[0]} counts by the length of the cache, in which "
            "the rows of a batch differ"
        )
    return rows


@contextmanager
def looked_up(model: PreTrainedModel, rows: Mapping[str, int], position_ids: torch.Tensor) -> Iterator[None]:
    """Let the tables that `table_rows` found return what belongs to `position_ids`, (batch, sequence) int64."""

    def hook(first: int) -> Hook:
        def lookup(module: torch.nn.Module, arguments: tuple[object, ...], output: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding(position_ids + first, module.weight)  # type: ignore[arg-type]

        return lookup

    with _hooked(model, {name: hook(first) for name, first in rows.items()}):
        yield


def _first_row(table: Any, output: Any) -> int | None:
    """Return the index of the first of the consecutive rows of `table` that `output` has; None if it has others."""
    if not isinstance(table, torch.Tensor) or not isinstance(output, torch.Tensor):
        return None
    if table.shape[-1] != output.shape[-1]:
        return None
    added = output.reshape(-1, table.shape[-1])[: PROBE.shape[1]]
    equal = (table.unfold(0, PROBE.shape[1], 1).transpose(1, 2) == added).flatten(1).all(dim=1).nonzero()
    return int(equal[0]) if len(equal) else None


def are_close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if `logits` equal those `expected`, but for rounding."""
    return torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def first_position(model: PreTrainedModel) -> int:
    """Return the first of a text's `position_ids` as `model` counts them by itself; 0 if it takes none.

    A table with a padding index may start after it, as RoBERTa's does: it was trained so, although transformers'
    `generate` counts from 0 unless it is given positions.
    """
    if not _takes_positions(model):
        return 0
    tables = _tables(model).values()
    paddings: set[int] = {getattr(table, "padding_idx", None) for table in tables} - {None}  # type: ignore[assignment]
    return next((index + 1 for index in paddings if _counts_from(model, index + 1)), 0)


def _refuse_other_starts(model: PreTrainedModel) -> None:
    """Raise ExportError if `model` by itself does not count from its `first_position`."""
    if not _counts_from(model, first_position(model)):
        raise ExportError(
            "it counts positions by itself, neither from 0 nor from the row after a table's padding index"
        )


def _counts_from(model: PreTrainedModel, first: int) -> bool:
    with torch.no_grad():
        alone = model(input_ids=PROBE, use_cache=True).logits
        positions = first + torch.arange(PROBE.shape[1])[None]
        return are_close(model(input_ids=PROBE, position_ids=positions, use_cache=True).logits, alone)


def _takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _tables(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the position tables of `model` by the names of their modules."""
    return {name: one for name, one in model.named_modules() if name.rsplit(".", 1)[-1] in POSITION_TABLES}


@contextmanager
def _hooked(model: PreTrainedModel, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Run with forward hooks on modules of `model`, by their names."""
    with ExitStack() as stack:
        for name, hook in hooks.items():
            stack.enter_context(model.get_submodule(name).register_forward_hook(hook))
        yield
