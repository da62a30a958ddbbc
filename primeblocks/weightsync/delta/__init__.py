"""What changed between two versions, without loss."""

__all__: list[str] = []
