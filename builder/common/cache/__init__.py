"""Files that builds keep on disk so that no work is done twice: results of stages, and fetched programs.

Everything here can be thrown away: a lost file costs time, nothing else. Knows files and keys; knows no graph.
"""
