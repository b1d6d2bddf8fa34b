"""Task `score`: logprobs of texts, continuations and choices."""
