"""Adapters to third-party packages, each in a module with the package's name."""
