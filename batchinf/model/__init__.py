"""The model of a job: where it lies, what its config says, its LoRA adapters, and the memory it needs.

Weights are never loaded here; `engines` does that.
"""
