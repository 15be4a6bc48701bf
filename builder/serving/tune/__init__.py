"""Tuning by trial: the values to try (space), one trial (trials), the search (search), writing the result (winner)."""
