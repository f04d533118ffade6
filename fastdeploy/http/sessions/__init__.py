"""Sessions that remember: turns of agents with the token ids that were sampled."""
