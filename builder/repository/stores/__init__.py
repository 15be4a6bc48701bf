"""Object stores, accessed by fsspec: they keep versions of models for the machines that serve them.

    PREFIX/blobs/sha256/AB/ABCD...    content of a file, by its hash: content in two versions is stored once
    PREFIX/models/NAME/N.json         manifest of version N: its files, by their paths, and their hashes

A manifest is written last and whole, so that a reader sees all of a version or nothing of it.
"""
