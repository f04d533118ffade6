"""The parts of benchmarks/sync_ways.py: runs of the trainer, their ledgers and figures, the table and the plots."""
