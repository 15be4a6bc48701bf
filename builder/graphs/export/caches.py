"""Caches that transformers gets while a decoder is exported: each layer's past tensors in, its present tensors out.

They store nothing. A layer's call of `update`, or its reading of cross-attention keys, says which layer runs, so that
the attention function (cached_attention.py) knows the tensors of its operator. Knows tensors; knows no architecture and
no task.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from builder.common.errors import ExportError


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name by which `model` takes and returns its cache: models of states alone have one of their own."""
    own = "cache_params"
    return own if own in inspect.signature(model.forward).parameters else "past_key_values"


class _NoStates(list[Any]):
    """Layers of a cache that stores nothing."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise ExportError(
            "its layers keep a state beside keys and values in the cache, which a decode loop has no place for"
        )


class ExportStates:
    """States of layers, which are inputs too; `past`: by layer, in the order of its states.

    `appended`: (batch,) bool, the rows whose states advance. A layer reads its states by its number before it computes
    with them: `take` returns the next one of the layer that runs, and `put` makes its successor an output.
    """

    def __init__(self, past: Mapping[int, Sequence[torch.Tensor]], appended: torch.Tensor) -> None:
        self.past, self.appended = past, appended
        self.present: dict[int, list[torch.Tensor]] = {layer: [] for layer in past}
        self.layer: int | None = None

    def begin_next(self) -> None:
        self.layer = next((layer for layer, present in self.present.items() if not present), None)

    def take(self) -> torch.Tensor:
        if self.layer is None or len(self.present[self.layer]) == len(self.past[self.layer]):
            raise ExportError("a layer computes with more states than its cache keeps")
        return self.past[self.layer][len(self.present[self.layer])]

    def put(self, present: torch.Tensor) -> None:
        assert self.layer is not None
        self.present[self.layer].append(present)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return present_state_0_0, present_state_0_1, ..."""
        for layer, states in self.past.items():
            if len(self.present[layer]) != len(states):
                raise ExportError(f"layer {layer} has a state that it does not update through the cache")
        return tuple(tensor for states in self.present.values() for tensor in states)


class ExportCache(Cache):  # type: ignore[misc]
    """Cache of a decoder's own keys and values; `past`: past_key_0, past_value_0, past_key_1, ...

    Layers without attention have None there. `states`: those of layers that keep some.
    """

    def __init__(
        self,
        past: Sequence[torch.Tensor | None],
        seqlens_k: torch.Tensor,
        total: torch.Tensor,
        states: ExportStates | None = None,
    ) -> None:
        self.layers: list[Any] = _NoStates()
        self.past: list[Any] = list(past)
        self.states = states
        self.present: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.seqlens_k = seqlens_k
        self.total = total
        self.layer: int | None = None
        self.updated: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # layers, with the keys and values they append
        self.bias: torch.Tensor | None = None
        self.rotations: dict[int, tuple[torch.Tensor, ...]] = {}
        self.positions: torch.Tensor | None = None  # (batch, sequence), for decoders that take them from the cache
        self.token_positions: torch.Tensor | None = None  # (batch, sequence), of the new tokens of a decoder alone
        self.cross: CrossCache | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.layer = layer
        self.updated.append((layer, key, value))
        return key, value

    def owner_of(self, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """Return the layer that appends these very tensors to its cache; None if none does."""
        return next((layer for layer, *tensors in self.updated if tensors[0] is key and tensors[1] is value), None)

    def begin_next(self) -> None:
        """Let the next layer run that attends, for layers that do not know their number."""
        self.layer = next((layer for layer in self._attending() if layer not in self.present), None)

    def _attending(self) -> list[int]:
        return [layer for layer in range(len(self)) if self.past[2 * layer] is not None]

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return present_key_0, present_value_0, present_key_1, ..., then the states."""
        present = _outputs(self.present, self._attending(), "an attention that does not use the cache")
        return present if self.states is None else (*present, *self.states.outputs())

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return no state: a layer then calls `update_conv_state`, whatever the number of its tokens."""
        self._begin_states(layer_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._begin_states(layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **options: Any) -> torch.Tensor:
        """Return the new tokens alone, (batch, channels, sequence): the convolution has those before them."""
        self._begin_states(layer_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **options: Any) -> torch.Tensor:
        return recurrent_states

    def _begin_states(self, layer: int) -> None:
        if self.states is None or layer not in self.states.past:
            raise ExportError("its layers keep a state that its cache does not show after a run")
        self.states.layer = layer

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return 0 if self.positions is None else self.positions[:, :1]

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
        return query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_initialized(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.past) // 2


class CrossCache(Cache):  # type: ignore[misc]
    """transformers' cross-attention cache, full already: each layer's keys and values are the graph's inputs.

    A model reads a layer's keys right before it attends to them; reading them sets `layer`, by which the attention
    function knows that it is called for cross-attention, and for which layer.
    `rows`: (places, beams), the row that is a place's n-th query; `places`: (rows,), where among those a row is;
    `last`: (places, 1, both kinds of all layers), the keys and values of each text's last token.
    """

    def __init__(
        self,
        past: Sequence[torch.Tensor],
        seqlens_k: torch.Tensor,
        total: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        self.layers: list[Any] = [
            _CrossLayer(self, index, *past[2 * index : 2 * index + 2]) for index in range(len(past) // 2)
        ]
        self.seqlens_k, self.total, self.rows, self.places = seqlens_k, total, rows, places
        sizes = [int(tensor.shape[1]) * int(tensor.shape[3]) for tensor in past]
        self.last = torch.split(last, sizes, dim=-1)
        self.present: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.layer: int | None = None

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return present_cross_key_0, present_cross_value_0, ..."""
        return _outputs(self.present, range(len(self)), "a cross-attention that is not fused")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1

    def __len__(self) -> int:
        return len(self.layers)


class _CrossLayer:
    def __init__(self, cache: CrossCache, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.cache, self.index, self.past = cache, index, (keys, values)

    @property
    def keys(self) -> torch.Tensor:
        self.cache.layer = self.index
        return self.past[0]

    @property
    def values(self) -> torch.Tensor:
        return self.past[1]


def _outputs(
    present: Mapping[int, tuple[torch.Tensor, ...]], layers: Sequence[int], other: str
) -> tuple[torch.Tensor, ...]:
    missing = [layer for layer in layers if layer not in present]
    if missing:
        raise ExportError(f"layer {missing[0]} of {len(layers)} has {other}")
    return tuple(tensor for layer in layers for tensor in present[layer])


_running: ContextVar[ExportCache | None] = ContextVar("running", default=None)


@contextmanager
def exporting(cache: ExportCache) -> Iterator[None]:
    """Run with attention functions that write to `cache`."""
    token = _running.set(cache)
    try:
        yield
    finally:
        _running.reset(token)


def is_exporting() -> bool:
    """Return True while a decoder's forward over caches as tensors runs."""
    return _running.get() is not None


def begin_next_states() -> None:
    """Let the next layer run that keeps states, for layers that do not know their number."""
    states = running_cache().states
    assert states is not None
    states.begin_next()


def running_cache() -> ExportCache:
    """Return the cache of the forward that runs now."""
    cache = _running.get()
    assert cache is not None
    return cache
