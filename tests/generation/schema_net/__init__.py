"""JSON schemas of many shapes, random walks through the texts that a guide allows, and the check of their results."""
