"""The field's protocols as job lists over train.py, and what runs them."""
