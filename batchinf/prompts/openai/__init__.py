"""Reads lines of OpenAI batch files: their prompts, their sampling, and what becomes of each field."""
