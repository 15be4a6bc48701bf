"""POST /v1/responses, without state: a request carries its whole conversation, and nothing is stored.

Source: https://platform.openai.com/docs/api-reference/responses
"""
