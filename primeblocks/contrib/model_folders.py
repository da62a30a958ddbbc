"""Folders with safetensors and config.json, made of published versions of the weights.

Only `adapters/sglang.py` needs model folders, and this adapter has never run on SGLang.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import (
    CapacityError,
    PlanError,
    PrimeblocksError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from ..layout import Layout
from ..weightsync import Plan, Subscriber
from ..weightsync.transports.transport import Transport

__all__ = ["ModelFolder", "ModelFolders"]

_WEIGHTS = "model.safetensors"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_OURS = re.compile(r"\d+-[0-9a-f]{8}")


@dataclass(frozen=True)
class ModelFolder:
    """A folder with the checked bytes of one version. Engines load the folder by its path."""

    version: int
    path: Path
    digest: str


class ModelFolders:
    """Makes one folder per version, for engines that load folders without checks of the bytes.

    All files of `like` except weights are copied, so that an engine can also start from the new
    folder. A folder appears only when it is complete. The name of a folder contains the version and
    the first 8 hex digits of the digest of the weights.

    Args:
        plan: the publisher's plan. In the plan, reader 0 must receive whole tensors.
        transport: any transport that stores versions, opened for reading.
        like: the checkpoint that the engines started from.
        root: the directory of the folders, which is created if missing.
        keep: the number of newest folders to keep, at least 2, because engines may go back to the
            previous folder.

    Raises:
        PlanError: the plan lacks tensors of `like`, has tensors of other shapes, or gives reader 0
            only parts of tensors. If a folder lacked tensors, an engine would keep its old tensors
            without an error.
        UnsupportedError: `like` has no safetensors files.
        UsageError: `keep` is less than 2.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        *,
        like: str | Path,
        root: str | Path,
        keep: int = 2,
    ) -> None:
        if keep < 2:
            raise UsageError(f"keep={keep} leaves no version to go back to; give at least 2.")
        self._plan, self._transport = plan, transport
        self._like, self._root, self._keep = Path(like), Path(root).absolute(), keep
        _check_covers(plan, self._like)

    def make(self, version: int, *, timeout_s: float) -> ModelFolder:
        """Wait for a version, check all its bytes and make its folder. Local.

        The call costs one `Subscriber.verify`. If the folder does not exist, the call also costs
        one `Subscriber.receive` and one write of the bytes. The write may continue after the
        deadline.

        Raises:
            DeadlineError, CorruptionError, PlanError, TransferError: as for `Subscriber.receive`.
            CapacityError: the disk has too little free space for the weights.
            TransferError: the folder cannot be written to `root`.
        """
        whole: dict[str, Tensor] = {}
        with Subscriber(self._plan, whole.update, self._transport) as subscriber:
            receipt = subscriber.verify(version, timeout_s=timeout_s)
            path = self._root / f"{version}-{receipt.digest[:8]}"
            try:
                if not path.is_dir():
                    self._root.mkdir(parents=True, exist_ok=True)
                    # Under a name that nobody looks for until it is whole.
                    with tempfile.TemporaryDirectory(prefix=".making-", dir=self._root) as scratch:
                        made = Path(scratch) / path.name
                        made.mkdir()
                        subscriber.receive(version, timeout_s=timeout_s)
                        self._check_room(version)
                        save_file(whole, made / _WEIGHTS, metadata={"format": "pt"})
                        _copy_small_files(self._like, made)
                        made.rename(path)
                self._prune()
            except PrimeblocksError:
                raise
            except (OSError, SafetensorError) as error:
                full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise (CapacityError if full else TransferError)(
                    f"the folder of version {version} was not made in {self._root}: {error}"
                ) from error
        return ModelFolder(version, path, receipt.digest)

    def _check_room(self, version: int) -> None:
        free, needed = shutil.disk_usage(self._root).free, self._plan.blob_bytes
        if free < needed:
            raise CapacityError(
                f"{self._root} has {free:,} bytes free; version {version} needs {needed:,}. Free "
                f"some space, or keep fewer than {self._keep} folders."
            )

    def _prune(self) -> None:
        ours = [path for path in self._root.iterdir() if _OURS.fullmatch(path.name)]
        ours.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in ours[: -self._keep]:
            shutil.rmtree(path)


def _check_covers(plan: Plan, like: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(like.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if not shapes:
        raise UnsupportedError(f"{like} has no *.safetensors. Save the checkpoint as safetensors.")
    sent = {name: spec.shape for name, spec in plan.target.items()}
    wants = plan.wants[0]
    parts = [n for n, shape in sent.items() if wants.get(n) != (Layout.whole(shape).shard,)]
    if parts:
        raise PlanError(
            f"reader 0 of the plan wants only a part of {parts[0]!r}, and of {len(parts) - 1} "
            "other tensors. Plan with source.whole() for reader 0."
        )
    missing = sorted(shapes.keys() - sent.keys())
    if missing:
        raise PlanError(
            f"{len(missing)} of {len(shapes)} tensors of {like} are not in the plan, such as "
            f"{missing[0]!r}. Plan for the checkpoint's names, or pass as `like` a checkpoint "
            "with the trainer's names."
        )
    for name, shape in shapes.items():
        if tuple(sent[name]) != shape:
            raise PlanError(
                f"{name!r} is planned as {tuple(sent[name])}; {like} has {shape}. Pass as `like` a "
                "checkpoint of the same model."
            )


def _copy_small_files(like: Path, to: Path) -> None:
    for path in like.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, to / path.name)
