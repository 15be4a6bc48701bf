"""Files that builds keep on disk so that no work is done twice: digests of files, stages, and their keys.

Everything here can be thrown away: a lost file costs time, nothing else. Knows files and keys; knows no graph.
"""
