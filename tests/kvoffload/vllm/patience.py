"""For tests with a real engine that ask what comes back and not how soon."""

from tests.deadlines import HANG_S


def be_patient() -> None:
    """Let no tier be late in this process, and no request go on without its pages.

    A busy machine would do it after a second: right, and another result.
    """
    from primeblocks.kvoffload import TieredStore
    from primeblocks.kvoffload.adapters.vllm import manager

    TieredStore.__init__.__kwdefaults__["patience_s"] = HANG_S
    manager.Speeds.patience_s = lambda speeds, pages: HANG_S
