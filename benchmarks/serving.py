"""Routes over fleets of engines, in virtual time, and a tier of KV pages under capture, counted.

`python -m benchmarks.serving` from the repository; some eight minutes of one core.

Agents on coding tasks, made after published figures, through 8 to 12 engines by several routes:
where caches have room for all of them, and where they have not. And the pages of a tier that are
of use to an engine that captures routes, as vLLM 0.33 keeps these and as `kvoffload` moves them.
"""

from .harness import main

__all__ = ["measure"]


def measure() -> dict[str, tuple[float, str, str]]:
    from .serving_parts import capped_routes, routes

    return routes.figures() | capped_routes.figures()


if __name__ == "__main__":
    main(measure)
