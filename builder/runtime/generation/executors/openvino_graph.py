"""Define names shared by the build of a decoder's graph for OpenVINO and its executor. Does not load OpenVINO."""

from __future__ import annotations

BLOCK = 32  # tokens; the size in OpenVINO's CPU plugin
DOMAIN = "build_repo"  # domain of the attention operator in the graph's file
# Inputs of the graph that locate a call's rows, and their keys and values: int32, by their number of axes.
TABLES = {
    "past_lens": 1,
    "subsequence_begins": 1,
    "block_indices": 1,
    "block_indices_begins": 1,
    "max_context_len": 0,
}
# Inputs of a graph whose layers keep states, in tables with a row for each slot. Operators over these tables take
# `STATE_INPUTS`, in this order.
STATE_TABLE = "state_table."  # what the names of tables begin with
STATE_TABLES = {"state_slots": 1, "state_slots_begins": 1, "state_interval": 1}
STATE_INPUTS = ("subsequence_begins", "state_slots", "state_slots_begins", "past_lens", "state_interval")
