"""Record what agents on a real vLLM ask of a page store: `-m benchmarks.kvoffload_parts.record`.

Writes `benchmarks/traces/*.jsonl.gz`, one run each; takes minutes. A tiny random model on the CPU
platform, in this process, with our store behind it, which has room for all pages. Each of 24 agents
asks for an answer, runs a tool, and asks again with the output of the tool; one that is done makes
room for the next. The tools are real processes on this repository, two at a time: reading a file,
searching a folder, a computation, and pytest. A random model cannot choose a tool, so a seeded
generator does, and says how long the answers are. Tokens are bytes of text. Four rollouts have one
prompt. Every 12 rollouts count as a new version: a new salt, with the same weights.

A line has `t`, seconds, and one of:

- `begin`, the rollout of a request that the engine schedules: `version`, and the pages of its
  prompt, of which the first `keep` are those of the rollout's last line;
- `finish`, the same with all pages of the answer;
- `save`, `load`, `pause`, `resume`, `end`, `queue`, `advance`: a call that reached the store;
- `preempted`, the number of requests that ran out of pages and began again.

Pages are the first eight digits of vLLM's hashes.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ..engine.environment import ENVIRONMENT
from .eviction_traces import TRACES

__all__ = ["RUNS"]

ROOT = TRACES.parents[1]
# Agents that the engine runs at once, and the pages of its cache.
RUNS = {"queue": (4, 160), "no_queue": (24, 320)}
AGENTS, ROLLOUTS, SAMPLES, BATCH = 24, 72, 4, 12
MODEL = {"num_layers": 4, "hidden": 256, "num_experts": 16, "top_k": 4, "vocab": 2048}
PAGE_TOKENS, MAX_TOKENS = 32, 1536
SYSTEM, PROMPT, OUTPUT = 256, 384, 320  # bytes, the latter two at most
PAGE_BYTES = 1 << 16
TOOL_S = 60.0
SHARES = {"read": 0.45, "search": 0.3, "python": 0.15, "pytest": 0.1}
COUNT = "print(sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, {})))"
TEST = """import pytest
@pytest.mark.parametrize("n", range({}))
def test(n):
    assert len(sorted(map(str, range(n)))) == n
"""


class Log:
    """Lines of a trace, and the calls that write them."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.start_s = time.monotonic()
        self.chains: dict[str, list[str]] = {}
        self.hashes: dict[str, bytes] = {}

    def add(self, **what: Any) -> None:
        self.lines.append({"t": round(time.monotonic() - self.start_s, 3), **what})

    def request(self, kind: str, request: Any) -> None:
        """Write the pages of a request, by what changed."""
        from primeblocks.kvoffload.adapters.vllm.tier import read_request

        said = read_request(request.kv_transfer_params)
        pages = self.short(request.block_hashes)
        before = self.chains.get(said.rollout, [])
        same = (one == other for one, other in zip(before, pages, strict=False))
        keep = [*same, False].index(False)
        self.chains[said.rollout] = pages
        self.add(**{kind: said.rollout}, version=said.version, keep=keep, pages=pages[keep:])

    def moved(self, kind: str, keys: Iterable[Any], rollout: Any) -> None:
        pages = self.short(key.hash for key in keys)
        last = self.lines[-1] if self.lines else {}
        if last.get(kind) == rollout:
            last["pages"] += pages
        elif pages:
            self.add(**{kind: rollout}, pages=pages)

    def short(self, hashes: Iterable[bytes]) -> list[str]:
        found = []
        for each in hashes:
            found.append(each.hex()[:8])
            assert self.hashes.setdefault(found[-1], bytes(each)) == bytes(each), "use more digits"
        return found


def listen(log: Log) -> None:
    """Write a line for each call that reaches the store, and for requests that begin and finish."""
    from primeblocks.kvoffload import TieredStore
    from primeblocks.kvoffload.adapters.vllm.manager import StoreManager
    from primeblocks.kvoffload.adapters.vllm.spec import OffloadingConnector

    waiting: dict[str, Any] = {}

    def tell(owner: type, name: str, line: Any) -> None:
        """Call `line` with the arguments of a method, before the method."""
        method = getattr(owner, name)

        def told(self: Any, *arguments: Any, **named: Any) -> Any:
            line(*arguments, **named)
            return method(self, *arguments, **named)

        setattr(owner, name, told)

    def came(request: Any) -> None:
        waiting[request.request_id] = request

    def scheduled(context: Any) -> None:
        if context.preempted_req_ids:
            log.add(preempted=len(context.preempted_req_ids))
        for request in context.new_req_ids:
            log.request("begin", waiting.pop(request))

    def finished(request: Any, _: Any) -> None:
        log.request("finish", request)

    tell(OffloadingConnector, "on_new_request", came)
    tell(StoreManager, "on_schedule_end", scheduled)
    tell(OffloadingConnector, "request_finished", finished)
    tell(OffloadingConnector, "request_finished_all_groups", finished)
    tell(TieredStore, "save_batch", lambda keys, _, **how: log.moved("save", keys, how["rollout"]))
    tell(TieredStore, "load_batch", lambda keys, **how: log.moved("load", keys, how["rollout"]))
    tell(TieredStore, "pause", lambda rollout, reason: log.add(pause=rollout, reason=reason))
    tell(TieredStore, "resume", lambda rollout: log.add(resume=rollout))
    tell(TieredStore, "end", lambda rollout: log.add(end=rollout))
    tell(TieredStore, "queue", lambda rollouts: log.add(queue=list(rollouts)))
    tell(TieredStore, "advance", lambda version: log.add(advance=version))


def run_tool(tool: str, random: Random, folder: Path) -> bytes:
    """Run a tool and return what it prints. Arguments are drawn, so times vary."""
    source = random.choice(sorted((ROOT / "primeblocks").rglob("*.py")))
    python = sys.executable
    if tool == "read":
        command = ["cat", str(source)]
    elif tool == "search":
        where = random.choice(["primeblocks/errors.py", "docs", "tests", "."])
        command = ["grep", "-rnI", "--exclude-dir=.*", random.choice(["def ", "class "]), where]
    elif tool == "python":
        command = [python, "-I", "-c", COUNT.format(random.randrange(1_000, 400_000))]
    else:
        test = folder / f"test_{random.randrange(10**9)}.py"
        test.write_text(TEST.format(random.randrange(10, 1_000)))
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    cwd = folder if tool == "pytest" else ROOT
    done = subprocess.run(command, cwd=cwd, capture_output=True, timeout=TOOL_S, check=False)
    return done.stdout[: random.randrange(16, OUTPUT)] or b"nothing"


@dataclass
class Agent:
    """A rollout."""

    name: str
    version: int
    tokens: list[int]
    turns: int


@dataclass
class Fleet:
    """Agents in a loop around an engine, each in its own turn."""

    engine: Any
    folder: Path
    random: Random = field(default_factory=lambda: Random(0))
    version: int = 0
    begun: int = 0
    done: int = 0
    writing: dict[str, Agent] = field(default_factory=dict)
    calls: dict[Future[bytes], Agent] = field(default_factory=dict)
    untold: dict[str, str] = field(default_factory=dict)  # tools that the engine has not heard of

    def run(self) -> None:
        with ThreadPoolExecutor(2) as tools:
            for _ in range(AGENTS):
                self.begin()
            while self.writing or self.calls:
                if not self.writing:
                    wait(self.calls, timeout=TOOL_S, return_when=FIRST_COMPLETED)
                for call in [call for call in self.calls if call.done()]:
                    agent = self.calls.pop(call)
                    agent.tokens += call.result()
                    self.untold.pop(agent.name, None)
                    self.ask(agent)
                for output in self.engine.step():
                    if output.finished:
                        self.answered(output, tools)

    def begin(self) -> None:
        if self.begun == ROLLOUTS:
            return
        group, sample = divmod(self.begun, SAMPLES)
        texts = sorted((ROOT / "docs").glob("*.md"))
        system = (ROOT / "README.md").read_bytes()[:SYSTEM]
        task = texts[group % len(texts)].read_bytes()[: PROMPT - 7 * group]
        turns = max(1, round(self.random.lognormvariate(1.9, 0.5)))
        self.begun += 1
        self.ask(Agent(f"{group}/{sample}", self.version, [*system, *task], turns))

    def ask(self, agent: Agent) -> None:
        import vllm

        from primeblocks.kvoffload.adapters.vllm import request_args

        agent.turns -= 1
        most = round(min(160, max(8, self.random.lognormvariate(3.6, 0.8))))
        is_last = agent.turns == 0 or len(agent.tokens) + most + OUTPUT > MAX_TOKENS
        agent.turns *= not is_last
        said = request_args(
            agent.version,
            rollout=agent.name,
            ends=[agent.name] if is_last else [],
            waits=self.untold,
        )
        self.untold = {}
        sampling = vllm.SamplingParams(
            max_tokens=most, temperature=1.0, seed=0, ignore_eos=True, detokenize=False,
            extra_args=said,
        )  # fmt: skip
        prompt = {"prompt_token_ids": agent.tokens, "cache_salt": f"v{agent.version}"}
        self.writing[agent.name] = agent
        self.engine.add_request(f"{agent.name}.{len(agent.tokens)}", prompt, sampling)

    def answered(self, output: Any, tools: ThreadPoolExecutor) -> None:
        name = output.request_id.partition(".")[0]
        agent = self.writing.pop(name)
        agent.tokens = [*agent.tokens, *output.outputs[0].token_ids]
        if agent.turns:
            (tool,) = self.random.choices([*SHARES], [*SHARES.values()])
            draw = Random(self.random.random())
            self.calls[tools.submit(run_tool, tool, draw, self.folder)] = agent
            self.untold[name] = tool
            return
        self.done += 1
        self.version = self.done // BATCH
        self.begin()


def record(run: str, folder: Path) -> Log:
    """Play one run."""
    import vllm

    from primeblocks.kvoffload.adapters.vllm import engine_args

    running, pages = RUNS[run]
    most = MAX_TOKENS // PAGE_TOKENS
    llm = vllm.LLM(
        str(folder / "model"),
        dtype="float32",
        max_model_len=MAX_TOKENS,
        max_num_seqs=running,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=pages,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **engine_args(primary_bytes=4 * most * PAGE_BYTES, host_bytes=ROLLOUTS * most * PAGE_BYTES),
    )
    log = Log()
    listen(log)
    Fleet(llm.llm_engine, folder).run()
    llm.llm_engine.engine_core.shutdown()
    return log


def main(run: str) -> None:
    """Record one run into its file."""
    from primeblocks.testing import tiny_models

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_models.save("qwen3_moe", folder / "model", seed=0, dtype="float32", **MODEL)
        log = record(run, folder)
    TRACES.mkdir(exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in log.lines)
    (TRACES / f"{run}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{run}: {len(log.lines)} lines, {log.lines[-1]['t']} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:  # a process for each engine
        for each in RUNS:
            command = [sys.executable, "-m", f"{__package__}.record", each]
            subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, timeout=1200)
