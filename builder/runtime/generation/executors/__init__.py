"""Run the decoder's graph over a range of slots: one interface (base.py), one file for each way."""
