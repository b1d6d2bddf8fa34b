"""batchinf: offline batch inference with vLLM, from a job spec to Parquet with logprobs."""

__version__ = "0.1.0"
