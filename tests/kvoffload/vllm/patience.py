"""For tests with a real engine that ask what comes back and not how soon.

As a script, this file is patient, and then calls `main` of the script that its argument names.
"""

import sys
from importlib import import_module
from pathlib import Path

from tests.deadlines import HANG_S


def be_patient() -> None:
    """Let no tier be late in this process, and no request go on without its pages.

    A busy machine would do it after a second: right, and another result.
    """
    from primeblocks.kvoffload import TieredStore
    from primeblocks.kvoffload.adapters.vllm import manager

    TieredStore.__init__.__kwdefaults__["patience_s"] = HANG_S
    manager.Speeds.patience_s = lambda speeds, pages: HANG_S
    manager._UNMEASURED_S = HANG_S


if __name__ in ("__main__", "__mp_main__"):  # An engine that is spawned runs its parent's script.
    be_patient()
if __name__ == "__main__":
    script = Path(sys.argv.pop(1))
    sys.path.insert(0, str(script.parent))
    import_module(script.stem).main()
