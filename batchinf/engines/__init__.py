"""The engines: one protocol, the scripted engine, and in `vllm` the only code that imports vLLM."""
