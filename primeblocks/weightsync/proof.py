"""The round-trip proof: push, perturb, restore, and each time observe what the engine holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ..errors import TransferError, UsageError
from ..layout import local_part
from .agree import Agreement
from .digest import as_buffer
from .manifest import NamedTensors, named_tensors

__all__ = ["RoundTrip", "differing", "digest_tensors", "prove_round_trip"]

_MESSAGE_BYTES = 4096
_MESSAGE_CHARS = 600  # A character takes up to six bytes in JSON.
# Of the dtypes that can be halved: bits, and how many of them are the mantissa's.
_HALVED = {
    torch.float64: (torch.int64, 52),
    torch.float32: (torch.int32, 23),
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
}
_CHUNK = 1 << 20
# A part that is missing from a fused tensor shows where it is longer than two pieces.
_PIECES, _LEAST_BYTES, _MOST_BYTES = 64, 256, 1 << 16


@dataclass(frozen=True)
class RoundTrip:
    """A proof that succeeded: the versions pushed, its duration and its number of tensors."""

    versions: tuple[int, int, int]
    seconds: float
    tensors: int


def prove_round_trip(
    parameters: NamedTensors,
    push: Callable[[int], object],
    observe: Callable[[], object] | None,
    *,
    version: int,
    timeout_s: float,
    names: Iterable[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> RoundTrip:
    """Show that what the trainer has is what the engine holds, before a run relies on it.

    Pushes the parameters, then perturbed ones, then the first again. Every piece of every tensor
    that the engine holds has to change with the second push, and to be exactly as at first after
    the third: a tensor or a part that never arrives fails, and so does garbage. Every floating
    element is negated and halved, which shows in whatever dtype it travels, and comes back bit for
    bit, without a copy; tied ones once. Whatever happens, the parameters end as they were; the
    engine holds them if this returns.

    Collective. Cost: three pushes and three observations.

    Args:
        parameters: of this rank; changed in place and back.
        push: makes the engine load a version of them; for example a publish, then an update.
        observe: returns what the engine holds: a module, its tensors by name, or `digest_tensors`
            of them where they are elsewhere. None on ranks that cannot see the engine.
        version: that of the first push; the next two are used too.
        timeout_s: for everything; `push` and `observe` have deadlines of their own.
        names: the tensors that have to be there and change. None takes the names of the floating
            `parameters`; an engine may have names of its own, such as `wiring.targets`. Whatever
            else is observed, integers and tables for example, only has to come back.
        group: a gloo group of the trainer's ranks; None is the default group, or no group.

    Raises:
        TransferError: the engine does not hold what was pushed, on all ranks; or time is up.
        UsageError: `observe` gives no tensors by name, or `names` is empty.

    Source: tokenspeed issue 1373, where an update reports success and loads memory that nobody
    wrote, which a check that only perturbs does not notice.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    size = dist.get_world_size(group) if group is not None or dist.is_initialized() else 1
    agreement = Agreement(world_size=size, group=group)
    wanted = list(_floating(parameters) if names is None else names)
    if observe is not None and not wanted:
        raise UsageError("there is nothing to prove: no name of a floating parameter is given.")

    def look(version: int) -> Mapping[str, tuple[str, ...]]:
        push(version)
        return {} if observe is None else _digests(observe())

    def agree(problem: str) -> None:
        told = agreement.exchange(
            {"problem": problem}, size_bytes=_MESSAGE_BYTES, deadline=deadline
        )
        for rank, reply in enumerate(told):
            if reply["problem"]:
                raise TransferError(f"rank {rank}: {reply['problem']}")

    before = look(version)
    lacks = [] if observe is None else [name for name in wanted if name not in before]
    with _perturbed(parameters):
        changed = look(version + 1)
    deaf = [] if observe is None else [n for n in wanted if _is_deaf(before, changed, n)]
    agree(
        _told(lacks, wanted, "are not among what the engine holds. Give names=, if it has others")
        or _told(deaf, wanted, "are as before after other weights: they do not arrive")
    )
    after = look(version + 2)
    wrong = differing(before, after)
    agree(_told(wrong, before, "are others after the same weights: it serves others"))
    versions = version, version + 1, version + 2
    return RoundTrip(versions, time.monotonic() - start, len(wanted))


def digest_tensors(tensors: NamedTensors) -> dict[str, tuple[str, ...]]:
    """Return, by name, an XXH3-64 of each piece of a tensor: equal where the tensors are. Local.

    A tensor has 64 pieces, of 256 bytes at least and 64 KiB at most; dtype and shape count.
    """
    return {
        name: tuple(_piece_digests(local_part(tensor.detach())))
        for name, tensor in named_tensors(tensors).items()
    }


def differing(some: Mapping[str, Iterable[str]], other: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names whose digests differ, or that only one of both has."""
    names = dict.fromkeys([*some, *other])
    return [name for name in names if some.get(name) != other.get(name)]


def _digests(held: object) -> dict[str, tuple[str, ...]]:
    """Return the digests of what `observe` gave."""
    if isinstance(held, torch.nn.Module):
        return digest_tensors(held)
    if isinstance(held, Mapping):
        if held and all(isinstance(one, Tensor) for one in held.values()):
            return digest_tensors(held)
        rows = {name: (one,) if isinstance(one, str) else one for name, one in held.items()}
        if all(isinstance(row, tuple | list) for row in rows.values()):
            return {name: tuple(row) for name, row in rows.items()}
    raise UsageError(
        f"observe gave {type(held).__name__}; the proof is by tensor. Give the engine's tensors by "
        "name, or digest_tensors of them."
    )


def _piece_digests(tensor: Tensor) -> Iterator[str]:
    head = f"{tensor.dtype} {tuple(tensor.shape)};".encode()
    room = as_buffer(tensor.cpu().contiguous())
    size = max(_LEAST_BYTES, min(_MOST_BYTES, -(-len(room) // _PIECES)))
    for start in range(0, max(1, len(room)), size):
        digest = xxhash.xxh3_64(head)
        digest.update(room[start : start + size])
        yield digest.hexdigest()


def _is_deaf(
    before: Mapping[str, tuple[str, ...]], changed: Mapping[str, tuple[str, ...]], name: str
) -> bool:
    """Tell whether some piece is as it was."""
    return any(a == b for a, b in zip(before.get(name, ()), changed.get(name, ()), strict=False))


def _told(found: list[str], of: Iterable[str], text: str) -> str:
    if not found:
        return ""
    return f"{len(found)} of {len(list(of))} tensors, such as {found[0]!r}, {text}"[:_MESSAGE_CHARS]


def _floating(parameters: NamedTensors) -> list[str]:
    tensors = named_tensors(parameters).items()
    return [
        name
        for name, one in tensors
        if (one.dtype.is_floating_point or one.is_complex()) and one.numel()
    ]


@contextmanager
def _perturbed(parameters: NamedTensors) -> Iterator[None]:
    # Tied tensors are one: two names, or views of the same elements.
    places = {}
    for parameter in named_tensors(parameters).values():
        tensor = local_part(parameter.detach())
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        places[*place, tensor.shape, tensor.stride()] = tensor
    done = []
    try:
        for tensor in places.values():
            _perturb(tensor)
            done.append(tensor)
        yield
    finally:
        for tensor in done:
            _perturb(tensor, back=True)


def _perturb(tensor: Tensor, *, back: bool = False) -> None:
    """Negate and halve each element, or take that back, exactly; integers are left alone.

    Halving alone would leave zeros as they are, and negating alone the scales of quantized tensors.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.dtype.is_floating_point:
        return
    if (
        tensor.dtype not in _HALVED
    ):  # Eight bits, of which the first is the sign where there is one.
        has_sign = tensor.dtype != torch.float8_e8m0fnu
        tensor.view(torch.uint8).bitwise_xor_(0x80 if has_sign else 1)
        return
    dtype, mantissa = _HALVED[tensor.dtype]
    bits = tensor.view(dtype)
    for part in bits.view(-1).split(_CHUNK) if bits.is_contiguous() else [bits]:
        _step(part, 1 << mantissa, by=1 if back else -1)


def _step(bits: Tensor, one: int, *, by: int) -> None:
    """Flip signs, and turn the exponents of normal numbers by one; `one` is the lowest such bit.

    Exponents wrap around: the least becomes the largest, so that there is a way back.
    """
    sign, most = torch.iinfo(bits.dtype).min, torch.iinfo(bits.dtype).max
    magnitude = bits & most
    infinite = most + 1 - one  # All bits of the exponent; what is above is no number.
    normal = (magnitude >= one) & (magnitude < infinite)
    turned = (magnitude - one + by * one).remainder_(infinite - one).add_(one)
    magnitude = torch.where(normal, turned, magnitude)
    bits.copy_(magnitude | (~bits & sign))
