"""Adapters for third-party packages. Each file has the name of its package."""
