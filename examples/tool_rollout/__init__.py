"""Rollouts of several turns with a calculator as a tool, over token ids.

calculator    the tool
rollout       one rollout: what a trainer needs of it, and a check of every promise
agent         the loop of turns
disturb       pauses and new weights, to show that rollouts survive them
__main__      the command line
"""
