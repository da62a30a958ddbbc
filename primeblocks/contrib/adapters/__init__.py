"""Adapters that have not run against the package that they are for. Import each by its own name."""
