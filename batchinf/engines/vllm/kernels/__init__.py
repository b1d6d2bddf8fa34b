"""Kernels of our own for NVIDIA GPUs, in Triton: logprobs, and the attention of decoding."""
