"""Structured outputs, reasoning and tool calls: what forces their form, and what reads the finished texts."""
