"""The scheduler of vLLM's engine process, with short loops for requests that are alike."""
