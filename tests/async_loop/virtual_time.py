"""An event loop in which waiting takes no time: it jumps to the next thing that is due."""

import asyncio
import selectors


class VirtualClock:
    """The clock of the running event loop."""

    def now(self):
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)


class _Jump(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("nothing is due, and nothing will be: a deadlock")
        self.now += max(0.0, timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self):
        return self._jump.now


def run(coroutine):
    """Run it to its end; threads are not waited for."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
