"""Adapters to other packages. Each is in the file or folder named after its package."""
