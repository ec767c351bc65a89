"""Tables and plots from result.json files."""
