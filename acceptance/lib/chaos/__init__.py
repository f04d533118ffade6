"""Pauses of a fleet while its replicas are killed, stopped and slowed: acceptance/fleet_chaos.py."""
