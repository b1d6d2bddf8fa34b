"""Task `generate`: text, n samples of each prompt."""
