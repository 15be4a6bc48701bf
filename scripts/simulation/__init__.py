"""Simulate a fleet of Tritons: the real routing code over servers, traffic and failures on a simulated clock."""
