"""The engines: one protocol, the scripted engine, and `vllm`, the only code that imports vLLM."""
