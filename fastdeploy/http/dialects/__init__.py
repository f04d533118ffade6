"""Other engines' control and generation routes, each a thin translation to the same engine calls."""
