"""Programs to read and to copy. Each folder is one: ``python -m examples.NAME``, from the root of the repository."""
