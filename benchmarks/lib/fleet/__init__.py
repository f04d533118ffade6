"""A fleet of engines on a runner that sleeps, and loads for it."""
