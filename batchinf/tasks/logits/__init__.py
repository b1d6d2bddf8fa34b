"""Task `logits`: the numbers of the last layer over the vocabulary."""
