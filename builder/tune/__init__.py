"""Settings by trial: what is tried (space), how one is judged (trials), the search (search), what is kept (winner)."""
