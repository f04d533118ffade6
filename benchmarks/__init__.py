"""Measurements and acceptance checks over real HTTP. Nothing here imports the engine."""
