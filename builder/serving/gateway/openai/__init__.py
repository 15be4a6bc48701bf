"""Serve OpenAI's routes.

Source of every shape: https://platform.openai.com/docs/api-reference
"""
