"""The data sets: one row each in `table.py`, registered by an explicit `table.register_all()`."""
