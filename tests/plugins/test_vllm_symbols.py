"""Every symbol of vLLM that we touch, looked up in the installed 0.32 and in an unpacked 0.33.

0.33 has no build for CPUs. `scripts/peers` unpacks its wheel into `.venv-peers/vllm-0.33`; sources
are read, nothing of them is imported here. Where 0.33 is absent its half is skipped.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import warnings
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__)
TABLE = HERE.with_name("vllm_symbols.txt")
PROJECT = HERE.parents[2]
NEW = PROJECT / ".venv-peers" / "vllm-0.33" / "vllm"
OURS = [
    *PROJECT.glob("primeblocks/plugins/vllm/*.py"),
    *PROJECT.glob("primeblocks/kvoffload/adapters/vllm/*.py"),
    PROJECT / "primeblocks/weightsync/adapters/vllm/worker.py",
    PROJECT / "primeblocks/weightsync/adapters/vllm/server.py",
]
# Only read where a patch is for the CPU platform, which 0.33 has no build for.
CPU_ONLY = re.compile(
    r"cpu_moe|cpu_worker|fused_moe|UnquantizedFusedMoEMethod|CompilationMode|current_platform"
)
# Our class, and the classes of vLLM whose methods it replaces.
IMPLEMENTS = {
    "kvoffload.adapters.vllm.spec:HostCopyWorker": ["v1.kv_offload.base:OffloadingWorker"],
    "kvoffload.adapters.vllm.spec:StoreOffloadingSpec": ["v1.kv_offload.base:OffloadingSpec"],
    "kvoffload.adapters.vllm.spec:UnlinkedRegion": [
        "v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion"
    ],
    "kvoffload.adapters.vllm.spec:OffloadingConnector": [
        "distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"
    ],
    "kvoffload.adapters.vllm.routes:RoutesWorker": ["v1.kv_offload.base:OffloadingWorker"],
    "kvoffload.adapters.vllm.tier:StoreTier": ["v1.kv_offload.tiering.base:SecondaryTierManager"],
    "kvoffload.adapters.vllm.manager:StoreManager": [
        "v1.kv_offload.base:OffloadingManager",
        "v1.kv_offload.tiering.manager:TieringOffloadingManager",
    ],
    "plugins.vllm.missing_routes:CapturedPages": [
        "distributed.aux_output_connector.store:BlockObjectStore"
    ],
    "weightsync.adapters.vllm.worker:PrimeblocksEngine": [
        "distributed.weight_transfer.base:WeightTransferEngine"
    ],
}


def roots():
    """The package of each version; 0.32's is not imported."""
    spec = importlib.util.find_spec("vllm")
    installed = None if spec is None else Path(next(iter(spec.submodule_search_locations)))
    return {"0.32": installed, "0.33": NEW if NEW.exists() else None}


@pytest.fixture(params=["0.32", "0.33"])
def version(request):
    if roots()[request.param] is None:
        pytest.skip(f"no vLLM {request.param} here; scripts/peers unpacks 0.33")
    return request.param


def table(version):
    """Symbols by module: {path: signature, or None for what is no function}."""
    found: dict[str, dict[str, str | None]] = {}
    module = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            module = line
            continue
        mark, entry = re.fullmatch(r" +(0\.33 |\+ )?(.+)", line).groups()
        if mark and version != "0.33":
            continue
        if called := re.fullmatch(r"([\w.]+)\((.*)\)", entry):
            found.setdefault(module, {})[called[1]] = called[2]
        elif ": " in entry:
            owner, _, names = entry.partition(": ")
            found.setdefault(module, {}).update(
                dict.fromkeys(f"{owner}.{n}" for n in names.split())
            )
        else:
            found.setdefault(module, {})[entry] = None
    return found


@cache
def source(version, module):
    path = roots()[version] / module.replace(".", "/")
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    return ast.parse(path.read_text())


def look_up(version, module, path):
    """The node that defines a symbol."""
    node = source(version, module)
    for name in path.split("."):
        here = [each for each in node.body if name in _names(each)]
        if not here and isinstance(node, ast.ClassDef):
            here = [
                each
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and ast.unparse(each) == f"self.{name}"
            ]
        assert here, f"vLLM {version} has no {module}:{path}"
        node = here[-1]
    return node


def _names(node):
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [each.id for each in targets if isinstance(each, ast.Name)]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [each.asname or each.name for each in names]
    return []


def signature(node):
    """Its parameters, as the table writes them."""
    spelled = re.sub(r"=[^,=]+(?=,|$)", "=", ast.unparse(_bare(node.args)))
    return re.sub(r"^(self|cls)(, )?", "", spelled)


def _bare(arguments):
    """Parameters without annotations, all defaults alike."""
    bare = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0].args
    for each in [*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg]:
        if each is not None:
            each.annotation = None
    bare.defaults = [ast.Constant(0) for _ in bare.defaults]
    bare.kw_defaults = [None if each is None else ast.Constant(0) for each in bare.kw_defaults]
    return bare


def test_vllm_has_every_symbol_as_we_use_it(version):
    wrong = []
    for module, symbols in table(version).items():
        for path, expected in symbols.items():
            node = look_up(version, module, path)
            if expected is not None and signature(node) != expected:
                wrong.append(f"{module}:{path}({signature(node)}), not ({expected})")
    assert not wrong, "\n".join(wrong)


def test_the_table_has_all_that_we_import():
    """Imports are what can be listed; attributes are in the table because somebody looked."""
    known = table("0.33")
    lacking = set()
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm."):
                continue
            module = node.module.removeprefix("vllm.")
            for name in (each.name for each in node.names):
                is_module = any(f"{module}.{name}" == one for one in known)
                has = any(one.split(".")[0] == name for one in known.get(module, {}))
                if not is_module and not has and not CPU_ONLY.search(f"{module}.{name}"):
                    lacking.add(f"{path.name}: {module}:{name}")
    assert not lacking, sorted(lacking)


@pytest.mark.vllm
def test_versions_that_nobody_looked_at_are_refused(monkeypatch):
    warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
    import vllm

    from primeblocks.errors import UnsupportedError
    from primeblocks.weightsync.adapters.vllm import register

    adapter = importlib.import_module("primeblocks.kvoffload.adapters.vllm")
    for release in ("0.31.2", "0.34.0", "0.3.3"):
        monkeypatch.setattr(vllm, "__version__", release)
        with pytest.raises(UnsupportedError, match=release):
            register()
        with pytest.raises(UnsupportedError, match=release):
            importlib.reload(adapter)
    monkeypatch.setattr(vllm, "__version__", "0.33.4")
    register()


@pytest.mark.vllm
def test_our_methods_take_what_either_vllm_passes(version):
    """Any call that fits vLLM's own signature, by position or by name, fits ours."""
    warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
    checked = 0
    for ours, theirs in IMPLEMENTS.items():
        module, _, name = ours.partition(":")
        methods = vars(getattr(importlib.import_module(f"primeblocks.{module}"), name))
        for their in theirs:
            host, _, base = their.partition(":")
            for path, expected in table(version)[host].items():
                owner, _, method = path.rpartition(".")
                # Constructors are the factories': tests/kvoffload/vllm/test_vllm_factories.py.
                if owner != base or not expected or method not in methods or method == "__init__":
                    continue
                taken = inspect.signature(getattr(methods[method], "__func__", methods[method]))
                positional, _, keywords = expected.partition("*, ")
                names = [each.strip(" =") for each in positional.split(",") if each.strip()]
                more = {each.strip(" ="): 0 for each in keywords.split(",") if each.strip()}
                taken.bind(0, *names, **more)
                taken.bind(0, **dict.fromkeys(names, 0), **more)
                checked += 1
    assert checked == 31
