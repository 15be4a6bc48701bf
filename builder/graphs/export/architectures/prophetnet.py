"""ProphetNet (arXiv:2001.04063): predicts from a second stream.

transformers 5.23 orders the biases of that stream by token and head, and adds them as if by head and token
(get_predict_relative_pos_embeddings): with one token both are the same, in a prompt they are not.
"""

from __future__ import annotations

REFUSED = "in a prompt its scores have the biases of other tokens, those after them too, as transformers computes it"
