"""Measurements and acceptance checks of a server over real HTTP, and measurements of single parts of the engine."""
