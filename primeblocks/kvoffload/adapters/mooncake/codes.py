"""Meanings of Mooncake's error codes for a tier.

Source: ErrorCode in mooncake-store/include/types.h, 0.3.13.
"""

from __future__ import annotations

from ....errors import CapacityError, CorruptionError, DeadlineError, PrimeblocksError

__all__ = ["LOST", "MISS", "error_of"]

# REPLICA_IS_NOT_READY, OBJECT_NOT_FOUND, REPLICA_NOT_FOUND, REPLICA_IS_GONE
MISS = frozenset({-703, -704, -710, -712})

_Kind = type[PrimeblocksError] | type[OSError]
_NO_ROOM = (CapacityError, "Mooncake has no room for the page")
_NO_CONNECTION = (ConnectionError, "Mooncake lost its connection")
_NO_ANSWER = (DeadlineError, "Mooncake was not answered in time")
_ERRORS: dict[int, tuple[_Kind, str]] = {
    -200: _NO_ROOM,  # NO_AVAILABLE_HANDLE
    -1602: _NO_ROOM,  # DFS_QUOTA_EXCEEDED
    -1700: _NO_ROOM,  # TENANT_QUOTA_EXCEEDED
    -800: _NO_CONNECTION,  # TRANSFER_FAIL
    -900: _NO_CONNECTION,  # RPC_FAIL
    -1601: _NO_CONNECTION,  # DFS_SERVICE_UNAVAILABLE
    -901: _NO_ANSWER,  # RPC_TIMEOUT
    -1600: _NO_ANSWER,  # DFS_NETWORK_TIMEOUT
    -707: (DeadlineError, "Mooncake's lease ended before the page was read"),  # LEASE_EXPIRED
    -801: (CorruptionError, "Mooncake read other bytes than it wrote"),  # CHECKSUM_MISMATCH
}

# After these, the next call is likely to wait just as long.
LOST = frozenset(code for code, is_ in _ERRORS.items() if is_ in (_NO_CONNECTION, _NO_ANSWER))


def error_of(code: int) -> PrimeblocksError | OSError | None:
    """Return the error that a code stands for; None if it is not negative."""
    if code >= 0:
        return None
    kind, what = _ERRORS.get(code, (OSError, "Mooncake refused"))
    return kind(f"{what}: error {code}")
