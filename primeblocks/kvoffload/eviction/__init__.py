"""Who leaves a full tier, what a tier knows of its pages, and traces to judge it by."""

__all__: list[str] = []
