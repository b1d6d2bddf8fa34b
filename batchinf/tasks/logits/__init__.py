"""Task `logits`: logits or logprobs over the vocabulary."""
