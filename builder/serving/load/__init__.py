"""Test the load that a served model can take: run tests, record them, compare two.

A test drives models with perf_analyzer (measure), reads its results and Triton's (figures), and saves them (record);
compare and page show them.
"""
