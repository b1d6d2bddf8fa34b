"""vLLM behind the engine protocol. No other package imports vLLM: its names, versions and traps stay here."""
