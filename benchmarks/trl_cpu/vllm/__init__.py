"""A stand-in: TRL asks whether vLLM is installed, since its server usually is."""
