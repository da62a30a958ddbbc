"""Entry points for host packages. The library itself imports none of them."""

__all__: list[str] = []
