"""One thin file a method; scripts/train.py imports the ones that its table names."""
