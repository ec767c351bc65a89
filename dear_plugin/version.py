"""The version of dear_plugin, read from here by setup.py and by the package itself."""

__version__ = "0.1.0"
