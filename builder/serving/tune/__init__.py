"""Tune settings by trial: the values to try (space), one trial (trials), the search (search), the result (winner)."""
