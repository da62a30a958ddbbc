"""Adapters to third-party packages. Each file is named after its package."""
