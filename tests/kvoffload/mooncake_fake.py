"""A fake of Mooncake Store's Python client. It is ours: no Mooncake code, no network.

Its answers are those that Mooncake 0.3.13 gave in our runs over TCP, and that its source reads
(real_client.cpp and store_py.cpp): a put of a key that is there answers 0 and changes nothing; a
read into too little room is -600, into too much -800, of nothing -704; what was read or asked for
lately is removed by force alone. It is stricter in one thing: memory that was not registered is
refused with -800, as RDMA would, where TCP takes it.
"""

import ctypes
import re
import threading

__all__ = ["FakeClient", "FakeMaster"]


class FakeMaster:
    """What all clients of one store share.

    Args:
        capacity_bytes: values beyond it answer -200. This fake evicts nothing.

    Faults: `answers` are codes that take the place of what the next calls do, one for each call.
    `before_call(name)` is called before each call of a client.
    """

    def __init__(self, *, capacity_bytes=1 << 30):
        self.capacity_bytes = capacity_bytes
        self.values = {}
        self.answers = []
        self.calls = []
        self.lock = threading.Lock()

    def before_call(self, name):
        """Nothing; tests replace it."""


class FakeClient:
    def __init__(self, master):
        self.master = master
        self.ranges = {}
        self.open = True

    def register_buffer(self, address, size):
        if self.master.answers:
            return self.master.answers.pop(0)
        self.ranges[address] = size
        return 0

    def unregister_buffer(self, address):
        return 0 if self.ranges.pop(address, None) is not None else -600

    def batch_put_from_multi_buffers(self, names, addresses, sizes):
        if not self.open:
            return []
        return self._each("put", self._put, names, addresses, sizes)

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        # Of a name that comes twice, Mooncake fills the last place and says that it filled both.
        last = dict(zip(names, addresses, strict=True))
        return self._each("get", self._get, names, [last[name] for name in names], sizes)

    def batch_is_exist(self, names):
        return self._each("exist", lambda name: int(name in self.master.values), names)

    def batch_remove(self, names, force=False):
        def remove(name):
            if name not in self.master.values:
                return -704
            if not force:
                return -706
            del self.master.values[name]
            return 0

        return self._each("remove", remove, names)

    def remove_by_regex(self, pattern, force=False):
        def remove(pattern):
            found = [name for name in self.master.values if force and re.search(pattern, name)]
            for name in found:
                del self.master.values[name]
            return len(found)

        return self._each("clear", remove, [pattern])[0]

    def close(self):
        assert self.open, "Mooncake does not like to be closed twice"
        assert not self.ranges, "what is registered would be read after it is freed"
        self.open = False
        return 0

    def _each(self, name, do, *columns):
        self.master.before_call(name)
        if not self.open:
            return [-600] * len(columns[0])
        with self.master.lock:
            self.master.calls.append(name)
            if self.master.answers:
                return [self.master.answers.pop(0)] * len(columns[0])
            return [do(*row) for row in zip(*columns, strict=True)]

    def _put(self, name, addresses, sizes):
        values = self.master.values
        if name in values:
            return 0
        if not self._registered(addresses, sizes):
            return -800
        if sum(map(len, values.values())) + sum(sizes) > self.master.capacity_bytes:
            return -200
        parts = zip(addresses, sizes, strict=True)
        values[name] = bytearray().join(ctypes.string_at(address, size) for address, size in parts)
        return 0

    def _get(self, name, addresses, sizes):
        value = self.master.values.get(name)
        if value is None:
            return -704
        if sum(sizes) < len(value):
            return -600
        if sum(sizes) > len(value) or not self._registered(addresses, sizes):
            return -800
        at = 0
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, bytes(value[at : at + size]), size)
            at += size
        return len(value)

    def _registered(self, addresses, sizes):
        return all(
            any(
                start <= address and address + size <= start + room
                for start, room in self.ranges.items()
            )
            for address, size in zip(addresses, sizes, strict=True)
        )
