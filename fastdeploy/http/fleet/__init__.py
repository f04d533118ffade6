"""Routes about the replicas of a fleet. A server without a gateway counts as a fleet of one replica."""
