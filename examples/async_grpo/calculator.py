"""A calculator tool that runs in sandboxed processes without access to files or sockets.

A call of `Calculator` uses an idle process, or starts a new process. At most `PROCESSES` calls run
at a time. If a call exceeds its deadline, `Calculator` kills only the process of this call.
"""

import ast
import asyncio
import operator
import resource
import sys
from pathlib import Path

DEADLINE_S = 5.0  # For one expression, which takes a millisecond on an idle machine.
PROCESSES = 4
START_S = 30.0
MEMORY_BYTES, PROCESSOR_S = 256 << 20, 600  # The second limit ends a process without a parent.
LONGEST = 200  # characters of an expression, and of a result
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


class Calculator:
    """Evaluates expressions in sandboxed processes. Use each object in only one event loop."""

    def __init__(self, *, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s, self.calls, self.late = deadline_s, 0, 0
        self._room, self._free = asyncio.Semaphore(PROCESSES), []

    async def __call__(self, expression: str) -> str:
        """Return the value as text, or a text that begins with "error"."""
        line = " ".join(expression.split())[:LONGEST].encode(errors="replace")
        async with self._room:
            self.calls += 1
            process, said = self._free.pop() if self._free else await self._start(), b""
            try:
                process.stdin.write(line + b"\n")
                said = await asyncio.wait_for(process.stdout.readline(), self.deadline_s)
            except TimeoutError:
                pass
            finally:  # Also after a cancelled call, whose result no other call may read.
                if said:
                    self._free.append(process)
                else:
                    await self._end(process)
            self.late += not said
            return said.decode().strip() or f"error: no result within {self.deadline_s:g} s"

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-I", "-S", str(Path(__file__))],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
        )
        await asyncio.wait_for(process.stdout.readline(), START_S)
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process, and wait for its end."""
        if process.returncode is None:
            process.kill()
        process.stdin.close()
        await process.wait()

    async def close(self) -> None:
        """End all processes. Call `close` after all calculations have ended."""
        while self._free:
            await self._end(self._free.pop())


def evaluate(node: ast.AST) -> float:
    """Return the value of an expression. Raise ValueError if the expression is not arithmetic."""
    if isinstance(node, ast.Expression):
        return evaluate(node.body)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.operand))
    raise ValueError("only numbers and + - * / ** ( )")


def serve() -> None:
    """Evaluate each line of standard input, after giving up the right to open files and sockets."""
    for what, most in {
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CPU: PROCESSOR_S,
    }.items():
        resource.setrlimit(what, (most, most))
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            text = f"{evaluate(ast.parse(line.strip(), mode='eval')):.10g}"
        except Exception as error:  # The model reads the error of its expression.
            text = f"error: {type(error).__name__}"
        print(text[:LONGEST], flush=True)


if __name__ == "__main__":
    serve()
