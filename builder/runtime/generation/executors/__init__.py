"""Run the decoder's graph over a range of slots: one interface (base.py), and one module for each executor."""
