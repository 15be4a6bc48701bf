"""What a decoder's graph for OpenVINO is made with, and its executor gives it. Does not load OpenVINO."""

from __future__ import annotations

BLOCK = 32  # tokens; what OpenVINO's CPU plugin has
DOMAIN = "build_repo"  # of its attention in the graph's file
# What tells a call where its rows and their keys and values are: inputs of the graph, int32, by their number of axes.
TABLES = {
    "past_lens": 1,
    "subsequence_begins": 1,
    "block_indices": 1,
    "block_indices_begins": 1,
    "max_context_len": 0,
}
