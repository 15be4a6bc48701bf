"""Recurrence over rows of different lengths, with PyTorch's own weights."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Recurrence(torch.nn.Module):
    """Bidirectional LSTM over the words of each row."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(size, size // 2, num_layers=layers, bidirectional=True, batch_first=True)

    def forward(self, words: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return features of words (rows, words, size); 0 after the `counts` (rows) words of a row."""
        packed = pack_padded_sequence(words, counts, batch_first=True, enforce_sorted=False)
        features, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        return features
