"""What the documentation says of the code and of recorded figures, written by `scripts/docs`."""
