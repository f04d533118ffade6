"""The parts of the programs in acceptance/."""
