"""Object stores: where versions of models are kept for machines that serve them, by fsspec.

    PREFIX/blobs/sha256/AB/ABCD...    what a file holds, by its hash: what is in two versions is there once
    PREFIX/models/NAME/N.json         the manifest of version N: its files, by their paths, and their hashes

A manifest is written last and whole, so that a reader sees all of a version or nothing of it.
"""
