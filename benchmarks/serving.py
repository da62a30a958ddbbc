"""Routes over a fleet of engines with prefix caches, in virtual time: no figure is of a clock.

`python -m benchmarks.serving` from the repository; some two minutes of one core.

Agents on coding tasks, made after published figures, through 8 to 12 engines by four routes: where
caches have room for all of them, and where they have not.
"""

from .harness import main

__all__ = ["measure"]


def measure() -> dict[str, tuple[float, str, str]]:
    from .serving_parts import routes

    return routes.figures()


if __name__ == "__main__":
    main(measure)
