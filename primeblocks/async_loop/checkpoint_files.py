"""A look at a model's files before an engine spends seconds on them."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import EngineError

__all__ = ["check_checkpoint"]


def check_checkpoint(path: str | Path) -> None:
    """Look at a checkpoint's files, headers and sizes only, before an engine spends seconds on it.

    Raises:
        EngineError: there is no such folder, no configuration, no weights, or a file is cut off.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise EngineError(f"wrong checkpoint: {folder} has no config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"wrong checkpoint: {folder} has no *.safetensors")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise EngineError(
                f"wrong checkpoint: {file.name} has {file.stat().st_size} bytes and is damaged or "
                f"cut off ({error}). Write it again."
            ) from error
