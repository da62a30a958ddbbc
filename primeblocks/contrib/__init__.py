"""Code that has never met its real host, and research: `README.md` says which, and why."""

__all__: list[str] = []
