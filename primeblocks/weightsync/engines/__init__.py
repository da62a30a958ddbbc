"""Running engines: driving several, in turns with a trainer, over HTTP, with adapters."""

__all__: list[str] = []
