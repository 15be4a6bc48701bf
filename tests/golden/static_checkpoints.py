"""Create the checkpoints that make_model2vec.py asks model2vec about, in the folder that the argument names."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.static_embeddings import MODEL2VEC, make_model2vec

if __name__ == "__main__":
    for form in MODEL2VEC:
        make_model2vec(Path(sys.argv[1]) / form, form)
