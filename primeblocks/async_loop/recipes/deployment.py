"""The processes of a deployment as a value that prints their command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations

from ...errors import PlanError, UnsupportedError, check_counts, shown
from .arguments import Arguments, Settings, arguments_of, merge, words_of
from .features import REFUSED, features_of, number_of
from .models import Model

__all__ = ["Deployment", "Process"]
_HOST = re.compile(r"[\w.:%-]+")
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")  # As a shell takes it.


@dataclass(frozen=True)
class Process:
    """One command on one host: an engine of vLLM, or a router.

    Args:
        role: "engine", "prefill", "decode" or "router".
        program: the words in front of the flags.
        ports: what it listens on, by purpose; "http" is where requests go.
        gpus: those of its host that it sees.
        model: what it serves; None for a router.

    Raises:
        PlanError: a GPU twice, more ranks than GPUs, a host, a GPU, a port or a variable that
            cannot be, or parallel degrees that do not divide the model.
        UnsupportedError: features that vLLM refuses together.
    """

    role: str
    host: str
    program: tuple[str, ...]
    arguments: Arguments
    ports: Mapping[str, range]
    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Model | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not _HOST.fullmatch(self.host):
            raise PlanError(f"host must be a name or an address; got {shown(self.host)}.")
        for gpu in self.gpus:
            check_counts(least=0, gpu=gpu)
        if len(set(self.gpus)) < len(self.gpus):
            raise PlanError(f"{self.role} would see a GPU twice: gpus={list(self.gpus)}")
        for name, ports in self.ports.items():
            if not ports or ports[0] < 1 or ports[-1] > 65535:
                raise PlanError(f"ports are 1 to 65535; got {ports} for {name}")
        _check_variables(self.environment)
        found = features_of(self.arguments)
        for pair, reason in REFUSED.items():
            if set(pair) <= set(found):
                raise UnsupportedError(f"{self.role}: {pair[0]} with {pair[1]}: {reason}")
        if self.model is None:
            return
        # Ranks of other hosts, or where a service places them, are not counted here.
        if not {"--nnodes", "--distributed-executor-backend"} & self.arguments.keys():
            _check_gpus(self)
        if self.model.heads % self.tensor:
            raise PlanError(
                f"{self.model.path} has {self.model.heads} attention heads, which tensor="
                f"{self.tensor} does not divide. Use a divisor."
            )
        if self.model.experts % self.experts:
            raise PlanError(
                f"{self.model.path} has {self.model.experts} experts, which {self.experts} ranks "
                "(data x tensor) do not divide: some would hold one more. Use a divisor."
            )

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return number_of(self.arguments, "--tensor-parallel-size")

    @property
    def experts(self) -> int:
        """Ranks over which the experts are spread, data and tensor parallel ones together."""
        if "--enable-expert-parallel" not in self.arguments:
            return 1
        return self.tensor * number_of(self.arguments, "--data-parallel-size")

    @property
    def url(self) -> str | None:
        """Address of its server; None where another process takes requests for it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.ports['http'][0]}" if "http" in self.ports else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each GPU: two a parameter, one with fp8; embeddings counted alike."""
        if self.model is None:
            return 0
        routed = self.model.expert_parameters // max(self.experts, self.tensor)
        rest = (self.model.parameters - self.model.expert_parameters) // self.tensor
        return (routed + rest) * (1 if "fp8" in features_of(self.arguments) else 2)

    def words(self) -> list[str]:
        """Return the command without its environment, as `subprocess` takes it. Pure."""
        return [*self.program, *words_of(self.arguments)]

    def command(self) -> str:
        """Return the line for a shell on its host. Pure."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words())])


@dataclass(frozen=True)
class Deployment:
    """Processes that serve together. A plain value: nothing is started.

    Raises:
        PlanError: no process, or two that want the same port or GPU of a host.
    """

    processes: tuple[Process, ...]

    def __post_init__(self) -> None:
        if not self.processes:
            raise PlanError("a deployment has at least one process; got none")
        for one, other in combinations(self.processes, 2):
            if one.host == other.host:
                _check_apart(one, other)

    def __add__(self, other: Deployment) -> Deployment:
        """Return the processes of both, whose ports and GPUs must differ. Pure."""
        return Deployment(self.processes + other.processes)

    def merge(
        self,
        *settings: Settings,
        environment: Mapping[str, str] | None = None,
        roles: Collection[str] = ("engine", "prefill", "decode"),
    ) -> Deployment:
        """Return the deployment with settings added to the processes of these roles. Pure.

        Args:
            settings: words of a command line, as the blocks' `server_args` return them, or engine
                arguments by vLLM's names, as in `FEATURES`.

        Raises:
            PlanError: no process has such a role, or two parts want different values.
            UnsupportedError: features that vLLM refuses together.
        """
        variables = {} if environment is None else environment
        if not isinstance(variables, Mapping) or not isinstance(roles, Collection):
            raise PlanError(
                "environment has values by name, and roles are several; got "
                f"{shown(environment)} and {shown(roles)}."
            )
        roles = (roles,) if isinstance(roles, str) else [*roles]
        if not any(process.role in roles for process in self.processes):
            present = sorted({process.role for process in self.processes})
            raise PlanError(
                f"no process is {' or '.join(map(str, roles))}; this deployment has {present}"
            )
        nothing: Arguments = {}
        added = reduce(merge, map(arguments_of, settings), nothing)

        def changed(process: Process) -> Process:
            for name in variables.keys() & process.environment.keys():
                if variables[name] != process.environment[name]:
                    raise PlanError(f"{name} is {process.environment[name]!r} in this deployment")
            return replace(
                process,
                arguments=merge(process.arguments, added),
                environment={**process.environment, **variables},
            )

        return Deployment(tuple(changed(p) if p.role in roles else p for p in self.processes))

    def commands(self) -> tuple[str, ...]:
        """Return a line for a shell for each process, in the order to start them. Pure."""
        return tuple(process.command() for process in self.processes)

    def table(self) -> str:
        """Return what runs where, for people. Pure."""
        rows = [("role", "host", "GPUs", "ports", "GiB a GPU", "features")]
        for process in self.processes:
            gib = f"{process.weight_bytes / 2**30:.0f}" if process.model else "-"
            ports = " ".join(f"{name} {_span(found)}" for name, found in process.ports.items())
            gpus = ",".join(map(str, process.gpus)) or "-"
            found = ", ".join(features_of(process.arguments)) or "-"
            rows.append((process.role, process.host, gpus, ports or "-", gib, found))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def _span(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"


def _check_variables(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        sound = isinstance(name, str) and isinstance(value, str) and "\0" not in value
        if not sound or not _VARIABLE.fullmatch(name):
            raise PlanError(f"no variable and its text: {shown(name)}, {shown(value)}")


def _check_gpus(process: Process) -> None:
    given = process.arguments
    data = number_of(given, "--data-parallel-size-local", default=0) or number_of(
        given, "--data-parallel-size"
    )
    if "--data-parallel-rank" in given:
        data = 1
    ranks = process.tensor * data * number_of(given, "--pipeline-parallel-size")
    if ranks > len(process.gpus):
        raise PlanError(
            f"{process.role} on {process.host} has {ranks} ranks (tensor x data x pipeline) and "
            f"{len(process.gpus)} GPUs. Pass degrees to the shape, which gives each rank its own."
        )


def _check_apart(one: Process, other: Process) -> None:
    if shared := set(one.gpus) & set(other.gpus):
        raise PlanError(
            f"{one.role} and {other.role} both want GPUs {sorted(shared)} of {one.host}: pass "
            "other gpus="
        )
    for name, ports in one.ports.items():
        for purpose, others in other.ports.items():
            if shared := set(ports) & set(others):
                raise PlanError(
                    f"{one.role} ({name}) and {other.role} ({purpose}) both want port "
                    f"{min(shared)} of {one.host}: pass another"
                )
