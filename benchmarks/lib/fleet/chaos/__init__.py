"""Pauses of a fleet while its replicas are killed, stopped and slowed: benchmarks/fleet_chaos.py."""
