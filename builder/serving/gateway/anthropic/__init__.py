"""Serve Anthropic's routes.

Source of every shape: https://docs.anthropic.com/en/api/messages
"""
