"""What a served model can take: load tests, what they record, how two are compared.

A test drives models with perf_analyzer (measure), reads what it and Triton saw (profile, statistics), and keeps it
(record); compare and page show it.
"""
