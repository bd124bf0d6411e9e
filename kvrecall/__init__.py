"""Conversational memory for self-hosted LLMs."""
