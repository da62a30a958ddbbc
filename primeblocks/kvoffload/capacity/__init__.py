"""How many GPUs hold a batch of rollouts."""

__all__: list[str] = []
