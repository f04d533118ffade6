"""Control and generation routes of other engines, each translated to the same engine calls."""
