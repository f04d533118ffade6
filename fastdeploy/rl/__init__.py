"""The trainer's side: clients and adapters. Imports no Paddle, and nothing of the engine."""
