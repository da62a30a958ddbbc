"""The saved state of a run, from which a killed run continues.

The folder of a run contains the newest saved weights and moments of Adam, and a journal.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from primeblocks.async_loop import Journal

WARM_VERSION = 1  # The engine starts with policy 0.
SAVE_EVERY = 5  # steps between two saves of the weights


class SavedRun:
    """The saved state of one run. With `folder=None`, the run is not saved.

    The run continues with the policy `version`, whose weights are in the folder `weights`. Before
    the first save, the run continues with the weights after the supervised training.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.version, self.weights, self.journal = folder, WARM_VERSION, None, None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        saved = {int(path.name[5:]): path for path in folder.glob("step-*[0-9]")}
        if saved:
            self.version = max(saved)
            self.weights = saved[self.version]
        self.journal = Journal(folder / "journal")

    async def save(self, write: Callable[[Path], None], *, version: int) -> None:
        """In every fifth step, save the weights. The journal may delete groups of earlier steps."""
        if self.journal is None or (version - WARM_VERSION) % SAVE_EVERY:
            return
        saved = self.folder / f"step-{version}"
        await asyncio.to_thread(write, saved)
        self.journal.checkpointed(version)  # The journal may delete earlier groups.
        for earlier in set(self.folder.glob("step-*")) - {saved}:  # Complete or not.
            await asyncio.to_thread(shutil.rmtree, earlier)

    def close(self) -> None:
        if self.journal is not None:
            print(self.journal.table(), flush=True)
            self.journal.close()
