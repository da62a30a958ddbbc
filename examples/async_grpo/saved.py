"""The state of a run in a folder, from which a killed run continues.

The folder has weights, Adam's moments and a journal.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from primeblocks.async_loop import Journal

WARM_VERSION = 1  # Policy 0 is what the engine starts with.
SAVE_EVERY = 10  # steps between weights on disk


class SavedRun:
    """The contents of the folder. Without a folder, nothing is saved.

    The run continues with the policy `version`, whose weights are stored in `weights`. With None,
    it continues with the weights after the supervised training.
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
        """Have the weights of a policy written where they are due, and make its steps final."""
        if self.journal is None or (version - WARM_VERSION) % SAVE_EVERY:
            return
        await asyncio.to_thread(write, self.folder / f"step-{version}")
        self.journal.checkpointed(version)  # Groups that led to these weights may go.

    def close(self) -> None:
        if self.journal is not None:
            print(self.journal.table(), flush=True)
            self.journal.close()
