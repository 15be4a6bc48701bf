"""POST /v1/responses, without state: a request has all of its conversation, and nothing is kept.

Source: https://platform.openai.com/docs/api-reference/responses
"""
