"""What scripts/bench.py measures, and with what."""
