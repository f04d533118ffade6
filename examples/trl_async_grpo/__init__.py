"""TRL's AsyncGRPOTrainer, unmodified, trains the embedded model with rollouts from a running server. See README.md."""
