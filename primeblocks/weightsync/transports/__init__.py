"""Ways on which versions travel from trainer ranks to readers."""

__all__: list[str] = []
