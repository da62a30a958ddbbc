"""The round-trip proof: push, perturb, restore, and look each time at what the engine serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import TransferError
from .agree import Agreement
from .digest import as_buffer
from .manifest import NamedTensors, named_tensors

__all__ = ["RoundTrip", "digest_tensors", "prove_round_trip"]

_MESSAGE_BYTES = 1024
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class RoundTrip:
    """A proof that went well: the versions that were pushed, and how long it took."""

    versions: tuple[int, int, int]
    seconds: float


def prove_round_trip(
    parameters: NamedTensors,
    push: Callable[[int], object],
    observe: Callable[[], object] | None,
    *,
    version: int,
    timeout_s: float,
    group: dist.ProcessGroup | None = None,
) -> RoundTrip:
    """Show that what the trainer has is what the engine serves, before a run relies on it.

    Pushes the parameters, then perturbed ones, then the first again. The engine has to answer
    otherwise after the second push, and exactly as at first after the third: an update that loads
    nothing, or garbage, fails. Every element changes and comes back bit for bit, without a copy:
    the perturbation (each part back to front, with its lowest bits flipped) undoes itself. Whatever
    happens, the parameters are as before afterwards; the engine serves them if this returns.

    Collective. Cost: three pushes and three observations.

    Args:
        parameters: of this rank; changed in place and back.
        push: makes the engine load a version of them; for example a publish, then an update.
        observe: what the engine answers, compared with `==`: log-probabilities of a prompt, or
            `digest_tensors` of its parameters. None on ranks that cannot see it.
        version: of the first push; the next two are used too.
        timeout_s: of everything; `push` and `observe` have deadlines of their own.
        group: a gloo group of the trainer's ranks; None is the default group, or no group.

    Raises:
        TransferError: the engine does not serve what was pushed, on all ranks; or time is up.

    Source: tokenspeed issue 1373, where an update answers that all is well and loads memory that
    nobody wrote, which a check that only perturbs does not notice.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    size = dist.get_world_size(group) if group is not None or dist.is_initialized() else 1
    agreement = Agreement(world_size=size, group=group)

    def look(version: int) -> object:
        push(version)
        return None if observe is None else observe()

    def agree(problem: str) -> None:
        told = agreement.exchange(
            {"problem": problem}, size_bytes=_MESSAGE_BYTES, deadline=deadline
        )
        for rank, reply in enumerate(told):
            if reply["problem"]:
                raise TransferError(f"rank {rank}: {reply['problem']}")

    before = look(version)
    with _perturbed(parameters):
        changed = look(version + 1)
    deaf = observe is not None and changed == before
    agree("the engine answers as before after other weights: they do not arrive" if deaf else "")
    after = look(version + 2)
    wrong = after != before
    agree("the engine answers otherwise after the same weights: it serves others" if wrong else "")
    return RoundTrip((version, version + 1, version + 2), time.monotonic() - start)


def digest_tensors(tensors: NamedTensors) -> str:
    """An XXH3-128 over names, dtypes, shapes and every byte: equal where the tensors are. Local."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(named_tensors(tensors).items()):
        local = _local(tensor)
        digest.update(f"{name} {local.dtype} {tuple(local.shape)};".encode())
        digest.update(as_buffer(local.cpu().contiguous()))
    return digest.hexdigest()


@contextmanager
def _perturbed(parameters: NamedTensors) -> Iterator[None]:
    tensors = [_local(tensor) for tensor in named_tensors(parameters).values()]
    done = []
    try:
        for tensor in tensors:
            _perturb(tensor)
            done.append(tensor)
        yield
    finally:
        for tensor in done:
            _perturb(tensor)


def _perturb(tensor: Tensor) -> None:
    """Back to front, lowest bits flipped. Twice is nothing; integers are left alone."""
    if tensor.dtype.is_floating_point:
        bits = tensor.view(_BITS[tensor.itemsize])
        # The largest float8_e4m3fn would become NaN.
        low = 0 if tensor.itemsize == 1 else 1
        bits.copy_(bits.flip(tuple(range(bits.ndim))) ^ low)


def _local(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
