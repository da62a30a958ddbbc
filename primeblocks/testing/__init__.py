"""Test tools, for users too."""
__all__: list[str] = []
