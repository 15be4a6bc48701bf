"""JSON schemas of many shapes, random walks through what a guide allows of each, and a judge of where they end."""
