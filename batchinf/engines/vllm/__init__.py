"""vLLM behind the engine protocol. No other package imports vLLM."""
