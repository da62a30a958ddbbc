"""Shapes of deployments. Each is a function of values, and shapes are combined by passing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from ...errors import PlanError, check_counts, shown
from .arguments import Settings, arguments_of, merge
from .deployment import Deployment, Process
from .features import number_of
from .models import Model

__all__ = ["POLICIES", "colocated", "prefill_decode", "replicas", "wide_ep", "with_router"]

# Of vllm-router 0.1.17.
POLICIES = (
    "cache_aware",
    "consistent_hash",
    "kv_aware",
    "power_of_two",
    "random",
    "round_robin",
    "sticky_least_loaded",
)
_Value = TypeVar("_Value")
_LOCAL = ("127.0.0.1",)
_GPUS = range(8)


def replicas(
    model: Model,
    count: int = 1,
    *,
    tensor: int = 1,
    hosts: Sequence[str] = _LOCAL,
    gpus: Sequence[int] = _GPUS,
    port: int = 8000,
) -> Deployment:
    """Return engines that know nothing of each other; one of them is the single node. Pure.

    Hosts are filled in turn. An engine lies on one host.

    Args:
        tensor: tensor-parallel GPUs of an engine.
        gpus: those of each host that may be used.
        port: of the first engine of a host; the next ones follow.

    Raises:
        PlanError: counts that are not positive, too few GPUs, or a degree that does not divide
            the model.
    """
    _check(hosts, gpus, count=count, tensor=tensor, port=port)
    room = len(gpus) // tensor
    if count > room * len(hosts):
        raise PlanError(
            f"{count} engines of {tensor} GPUs need {-(-count // room) if room else 'larger'} hosts"
            f" of {len(gpus)} GPUs; got {len(hosts)}. Give more hosts, or lower count or tensor."
        )
    processes = []
    for index in range(count):
        host, place = hosts[index // room], index % room
        own = tuple(gpus[place * tensor : (place + 1) * tensor])
        settings = {"tensor_parallel_size": tensor}
        processes.append(_engine(model, host, port + place, own, settings))
    return Deployment(tuple(processes))


def wide_ep(
    model: Model,
    data: int,
    *,
    tensor: int = 1,
    hosts: Sequence[str] = _LOCAL,
    gpus: Sequence[int] = _GPUS,
    port: int = 8000,
    rpc_port: int = 13345,
    servers: Literal["first", "each"] = "first",
) -> Deployment:
    """Return one engine over many GPUs: attention is replicated, experts are spread. Pure.

    Args:
        data: data-parallel ranks; with `tensor` GPUs each, these hold one part of the experts each.
        rpc_port: where the ranks of all hosts meet, on the first one.
        servers: "first": one server on the first host, and control calls there reach all ranks;
            "each": one on each host, for a router, and control calls must go to every one.

    Raises:
        PlanError: counts that are not positive, ranks that do not fill the hosts, or degrees
            that do not divide the model.
    """
    _check(hosts, gpus, data=data, tensor=tensor, port=port, rpc_port=rpc_port)
    if servers not in ("first", "each"):
        raise PlanError(f'servers is "first" or "each"; got {shown(servers)}')
    local = len(gpus) // tensor
    if len(hosts) == 1 and data < local:
        local = data
    if data != local * len(hosts):
        raise PlanError(
            f"{len(hosts)} hosts of {len(gpus)} GPUs have {local * len(hosts)} ranks of {tensor} "
            f"GPUs; got data={data}. Give {-(-data // local) if local else 'larger'} hosts, or "
            "other gpus."
        )
    own = tuple(gpus[: local * tensor])
    degrees: dict[str, object] = {"tensor_parallel_size": tensor, "data_parallel_size": data}
    if len(hosts) == 1:
        settings = {**degrees, "enable_expert_parallel": True}
        return Deployment((_engine(model, hosts[0], port, own, settings),))
    processes = []
    for index, host in enumerate(hosts):
        served = port if index == 0 or servers == "each" else None
        settings = {
            **degrees,
            "enable_expert_parallel": True,
            "data_parallel_size_local": local,
            "data_parallel_address": hosts[0],
            "data_parallel_rpc_port": rpc_port,
        }
        # vLLM takes a start rank beside a server to mean one server on each host.
        if servers == "each":
            settings |= {"data_parallel_hybrid_lb": True}
        if servers == "each" or served is None:
            settings |= {"data_parallel_start_rank": index * local}
        if served is None:
            settings |= {"headless": True}
        processes.append(_engine(model, host, served, own, settings))
    first = processes[0]
    ports = {**first.ports, "rpc": range(rpc_port, rpc_port + 1)}
    return Deployment((replace(first, ports=ports), *processes[1:]))


def prefill_decode(
    prefill: Deployment,
    decode: Deployment,
    *,
    transfer: Mapping[str, Settings] | None = None,
    side_port: int = 5600,
) -> Deployment:
    """Return engines that compute prompts and engines that go on from their pages, by NIXL. Pure.

    Put `with_router` around it: a request goes through one engine of each kind. Where NIXL cannot
    run, `colocated` is the fallback. Leave `engine_id` to vLLM, which draws one for each start: a
    prefill engine that restarts under its old one is not read from again. A decode engine computes
    pages that it cannot read.

    Args:
        prefill: engines of any shape; `decode` likewise, on other GPUs.
        transfer: words or arguments by role, "prefill" and "decode", in place of plain NIXL: what
            `multi(nixl(role), native(...))` of kvoffload returns, as words.
        side_port: of NIXL's first handshake on a host; one follows for each data-parallel rank.

    Raises:
        PlanError: different models, a decode engine with fewer tensor-parallel GPUs than a prefill
            engine or no multiple of them, or engines that meet on a port or a GPU.
        UnsupportedError: capture of routes, where `transfer` is not NIXL alone.
    """
    _check_degrees(prefill, decode)
    check_counts(side_port=side_port)
    is_by_role = isinstance(transfer, Mapping) and transfer.keys() == {"prefill", "decode"}
    if transfer is not None and not is_by_role:
        raise PlanError(f'transfer has "prefill" and "decode"; got {shown(transfer)}')
    taken: dict[str, int] = {}
    processes = []
    for role, deployment in (("prefill", prefill), ("decode", decode)):
        settings = _nixl(role) if transfer is None else transfer[role]
        for process in deployment.processes:
            given = process.arguments
            start = number_of(given, "--data-parallel-start-rank", default=0)
            ranks = max(1, len(process.gpus) // process.tensor)
            base = side_port + taken.get(process.host, 0)
            taken[process.host] = taken.get(process.host, 0) + start + ranks
            variables = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": process.host,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(base),
            }
            processes.append(
                replace(
                    process,
                    role=role,
                    arguments=merge(given, arguments_of(settings)),
                    environment={**process.environment, **variables},
                    ports={**process.ports, "nixl": range(base + start, base + start + ranks)},
                )
            )
    return Deployment(tuple(processes))


def colocated(deployment: Deployment) -> Deployment:
    """Return the same engines, each of which computes prompts and goes on from them. Pure.

    The fallback of `prefill_decode` where there is no fast network, or for capture with tiers.
    Transfers and tiers are dropped: merge tiers again. A router comes last: put it around what
    this returns.

    Raises:
        PlanError: an engine is neither prefill nor decode.
    """
    processes = []
    for process in deployment.processes:
        if process.role not in ("prefill", "decode"):
            raise PlanError(
                f"colocated takes what prefill_decode returned; got role {process.role}"
            )
        processes.append(
            replace(
                process,
                role="engine",
                arguments=_without(process.arguments, "--kv-transfer-config"),
                environment=_without(process.environment, "VLLM_NIXL_SIDE_CHANNEL_"),
                ports=_without(process.ports, "nixl"),
            )
        )
    return Deployment(tuple(processes))


def with_router(
    deployment: Deployment,
    *,
    policy: str = "cache_aware",
    host: str = _LOCAL[0],
    port: int = 30000,
    metrics_port: int = 29000,
) -> Deployment:
    """Return the deployment with vllm-router 0.1.17 in front of its servers. Pure.

    Control calls (weights, pause, sleep) that go to the router reach *one* engine: send them to
    every engine. Pass its further flags by `merge(..., roles=["router"])`.

    Raises:
        PlanError: an unknown policy, or a deployment with only one kind of prefill and decode.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy is one of {', '.join(POLICIES)}; got {shown(policy)}")
    check_counts(port=port, metrics_port=metrics_port)
    urls: dict[str, list[str]] = {}
    for process in deployment.processes:
        if process.url is not None:
            urls.setdefault(process.role, []).append(process.url)
    if set(urls) == {"engine"}:
        workers = arguments_of({"worker_urls": urls["engine"]})
    elif set(urls) == {"prefill", "decode"}:
        flags = {f"--{role}": tuple((url,) for url in found) for role, found in urls.items()}
        workers = {"--vllm-pd-disaggregation": ((),), **flags, "--kv-connector": (("nixl",),)}
    else:
        raise PlanError(
            f"a router stands before engines, or before prefill and decode; got {sorted(urls)}"
        )
    own = {"host": host, "port": port, "policy": policy}
    metrics = {"prometheus_host": host, "prometheus_port": metrics_port}
    ports = {"http": range(port, port + 1), "metrics": range(metrics_port, metrics_port + 1)}
    arguments = merge(workers, arguments_of({**own, **metrics}))
    return deployment + Deployment((Process("router", host, ("vllm-router",), arguments, ports),))


def _engine(
    model: Model,
    host: str,
    port: int | None,
    gpus: tuple[int, ...],
    settings: Mapping[str, object],
) -> Process:
    if not isinstance(model, Model):
        raise PlanError(f"needs a Model, of MODELS or your own; got {shown(model)}.")
    served = {} if port is None else {"host": host, "port": port}
    return Process(
        role="engine",
        host=host,
        program=("vllm", "serve", model.path),
        arguments=arguments_of({**served, **settings}),
        ports={} if port is None else {"http": range(port, port + 1)},
        gpus=gpus,
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))},
        model=model,
    )


def _check(hosts: Sequence[str], gpus: Sequence[int], **counts: int) -> None:
    if isinstance(hosts, str):
        raise PlanError(f"hosts is a list of names; got {hosts!r}. Pass [{hosts!r}].")
    for name, listed in (("hosts", hosts), ("gpus", gpus)):
        if not isinstance(listed, Sequence):
            raise PlanError(f"{name} is a list; got {shown(listed)}.")
    check_counts(**counts, hosts=len(hosts))


def _check_degrees(prefill: Deployment, decode: Deployment) -> None:
    if others := {each.role for each in (prefill + decode).processes} - {"engine"}:
        raise PlanError(f"prefill_decode takes engines; got {sorted(others)}. Add a router last.")
    for one in prefill.processes:
        for other in decode.processes:
            if one.model != other.model:
                raise PlanError("prefill and decode serve different models: pages have no use")
            if one.tensor > other.tensor:
                raise PlanError(
                    f"prefill has tensor={one.tensor}, decode {other.tensor}: a decode rank would "
                    "read parts of several prefill ranks. Use at least as many for decode."
                )
            if other.tensor % one.tensor:
                raise PlanError(
                    f"decode's tensor={other.tensor} is no multiple of prefill's {one.tensor}, as "
                    "NIXL's connector wants it"
                )


def _nixl(role: str) -> dict[str, object]:
    kind = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    config = {"kv_connector": "NixlConnector", "kv_role": kind}
    if role == "decode":
        # Pages that cannot be read are computed: else each such request is an error of this engine.
        config["kv_load_failure_policy"] = "recompute"
    return {"kv_transfer_config": config}


def _without(mapping: Mapping[str, _Value], start: str) -> dict[str, _Value]:
    return {name: value for name, value in mapping.items() if not name.startswith(start)}
