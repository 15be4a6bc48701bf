"""Documentation of the code and of recorded figures that `scripts/docs` writes."""
