"""Entry points of host packages; nothing here is imported by the library itself."""

__all__: list[str] = []
