"""JSON schemas of many shapes, random walks through the texts that a guide allows, and a judge of their ends."""
