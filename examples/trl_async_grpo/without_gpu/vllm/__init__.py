"""A stand-in for vLLM: TRL checks that it is installed."""
