"""What trainer, checkpoint and engine call the same weights, and how they lie there."""

__all__: list[str] = []
