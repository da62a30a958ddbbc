"""Adapters that have never run against their real host, and research. `README.md` gives reasons."""

__all__: list[str] = []
