"""What builds keep on disk, so that nothing is made twice: digests of files, stages, and what they are called by.

Everything here can be thrown away: a lost file costs time, nothing else. Knows files and keys; knows no graph.
"""
