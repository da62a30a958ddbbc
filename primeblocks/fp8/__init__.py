"""TBD"""

__all__: list[str] = []
