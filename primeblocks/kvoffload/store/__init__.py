"""Pages in several tiers: one catalogue decides, threads move."""

__all__: list[str] = []
