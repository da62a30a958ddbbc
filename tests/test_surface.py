"""What a user may rely on before reading any code: names, imports, directions, documentation."""

import ast
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import primeblocks
from primeblocks.errors import how_it_ended
from tests.deadlines import HANG_S, JOB_S

PACKAGE = Path(primeblocks.__file__).parent
ROOT = PACKAGE.parent
BLOCKS = (
    *("async_loop", "capture", "exact", "fp8", "kvoffload", "losses"),
    *("parallel", "replay", "serving", "weightsync"),
)
ABOVE = ("contrib", "planning", "plugins")  # may import blocks; no block imports them
FLOOR = (
    *("__init__.py", "attachments.py", "clock.py", "codec.py", "errors.py"),
    *("groups.py", "layout.py", "py.typed", "rollout.py"),
)
BASE = {"jaxtyping", "numpy", "safetensors", "torch", "xxhash"}
# Third-party names outside the adapter that bears them.
ALSO_IMPORTED_BY = {
    "testing/strategies.py": {"hypothesis"},
    "testing/tiny_models.py": {"transformers"},
}
MAX_LINES = 400
MAX_NAMES = 15
MAX_EXAMPLE_LINES = 600  # A script is read from top to bottom and copied whole.

FILES = sorted(file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py"))
LOADABLE = [file for file in FILES if "adapters/" not in file and "plugins/" not in file]


@cache
def _tree(file):
    return ast.parse((PACKAGE / file).read_text())


def _module(file):
    parts = ["primeblocks", *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file):
    """Absolute names of everything that a file imports, at any depth."""
    package = _module(file).split(".")
    if not file.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _declared(file):
    """What a file lists in `__all__`; None without one."""
    for node in _tree(file).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)
    return None


def _python(code, cwd, *, timeout_s=HANG_S):
    """Run code in a fresh interpreter that finds packages in `cwd` first."""
    # -I would hide the folder; PYTHONPATH would outlive it in a child. This does neither.
    code = f"import sys; sys.path.insert(0, {str(cwd)!r})\n{code}"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"it {how_it_ended(done.returncode)}\n{done.stderr}"
    return done.stdout


INERT = """
import logging, os, threading, warnings
environment, filters = dict(os.environ), list(warnings.filters)
import primeblocks
assert "torch" not in sys.modules, "importing primeblocks loads torch"
import jaxtyping, numpy, safetensors.torch, torch, xxhash
import torch.distributed.fsdp, torch.distributed.tensor
base = {{name.partition(".")[0] for name in sys.modules}}
settings = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
import importlib
for name in {modules!r}:
    importlib.import_module(name)
loaded = {{name.partition(".")[0] for name in sys.modules}} - base - sys.stdlib_module_names
assert loaded <= {{"primeblocks"}}, f"loaded {{loaded}}"
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert settings == (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
assert not logging.root.handlers and logging.root.level == logging.WARNING
named = [name for name in logging.root.manager.loggerDict if name.startswith("primeblocks")]
assert not any(logging.getLogger(name).handlers for name in named), named
assert threading.active_count() == 1, threading.enumerate()
assert dict(os.environ) == environment and warnings.filters[-len(filters):] == filters
"""


def test_import_is_inert():
    modules = [_module(file) for file in LOADABLE if file != "testing/strategies.py"]
    _python(INERT.format(modules=modules), ROOT)


# Each block in a fork of a process that has torch, and in a folder that has no other block.
LIFTED = """
import importlib, os, pathlib, warnings
import jaxtyping, numpy, safetensors.torch, torch, xxhash
import torch.distributed.fsdp, torch.distributed.tensor
for block, modules in {modules!r}.items():
    warnings.simplefilter("ignore")  # Of forks, which later versions of Python warn of.
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, block
        continue
    warnings.simplefilter("error")
    sys.path.insert(0, os.path.abspath(block))
    import primeblocks
    assert pathlib.Path(primeblocks.__file__).parent == pathlib.Path(block, "primeblocks").resolve()
    made, *_ = map(importlib.import_module, modules)  # The block is the first.
    names = [name for name in made.__all__ if getattr(made, name) is not None]
    print(block, *names, flush=True)
    os._exit(0)  # Without the end of an interpreter that has torch, which takes a second.
"""


def test_a_block_can_be_lifted_out(tmp_path):
    modules = {}
    for block in BLOCKS:
        home = tmp_path / block / "primeblocks"
        shutil.copytree(PACKAGE / block, home / block, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FLOOR:
            shutil.copy(PACKAGE / name, home / name)
        modules[block] = [_module(file) for file in LOADABLE if file.startswith(f"{block}/")]
    told = _python(LIFTED.format(modules=modules), tmp_path, timeout_s=JOB_S)
    found = [line.split() for line in told.splitlines()]
    assert found == [[block, *_declared(f"{block}/__init__.py")] for block in BLOCKS]
    assert min(map(len, found)) > 1, "a block has no public names"


def _faults(files, check):
    """What `check` finds in each file, of those in which it finds anything."""
    found = {file: check(file) for file in files}
    return {file: fault for file, fault in found.items() if fault}


def test_public_names_equal_all():
    def check(file):
        declared, is_package = _declared(file), file.endswith("__init__.py")
        if Path(file).parent.name in ("adapters", "plugins") and is_package:
            return declared and f"what an adapter holds is named by its own module: {declared}"
        if declared is None:
            return "no __all__"
        kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
        defined = {node.name for node in _tree(file).body if isinstance(node, kinds)}
        lost = {name for name in defined if not name.startswith("_")} - set(declared)
        order = sorted(declared, key=lambda name: (not name.isupper(), name[0].islower(), name))
        if lost or len(declared) > len(set(declared)):
            return f"neither private nor in __all__, or twice in it: {lost or declared}"
        return is_package and file != "__init__.py" and declared != order and "unsorted"

    assert _faults(FILES, check) == {}


def test_every_name_in_all_resolves():
    def check(file):
        module = importlib.import_module(_module(file))
        return [name for name in module.__all__ if not hasattr(module, name)]

    assert _faults(LOADABLE, check) == {}


@pytest.mark.parametrize("block", [*BLOCKS, "planning"])
def test_a_block_exports_what_it_imports(block):
    file = f"{block}/__init__.py"
    exported = [
        alias.asname or alias.name
        for node in _tree(file).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(exported) == sorted(_declared(file))
    assert inspect.getdoc(importlib.import_module(f"primeblocks.{block}"))


@pytest.mark.parametrize("package", ["primeblocks", "primeblocks.testing"])
def test_lazy_packages_show_their_names(package):
    module = importlib.import_module(package)
    assert dir(module) == module.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense


def test_third_party_names_stay_in_the_file_that_bears_them():
    def check(file):
        allowed = BASE | {"primeblocks"} | ALSO_IMPORTED_BY.get(file, set())
        for home in ("adapters/", "plugins/"):
            if home in file:
                allowed.add(Path(file.split(home)[1]).parts[0].removesuffix(".py"))
        tops = {name.partition(".")[0] for name in _imported(file) if not name.startswith(".")}
        return tops - allowed - sys.stdlib_module_names

    assert _faults(FILES, check) == {}


def test_adapters_are_imported_by_plugins_alone():
    others = [file for file in FILES if not file.startswith("plugins/") and "adapters/" not in file]

    def check(file):
        return [name for name in _imported(file) if "adapters" in name.split(".")]

    assert _faults(others, check) == {}


def test_files_are_found():
    """What the checks above look at, and that they can fail."""
    assert len(FILES) > 200
    assert {file.split("/")[0] for file in FILES} >= {*BLOCKS, *ABOVE, "testing"}
    assert _faults(FILES[:3], lambda file: file == FILES[1]) == {FILES[1]: True}


def _namespaces(package):
    """The packages and modules that a block names in its `__all__`."""
    values = [getattr(package, name) for name in package.__all__]
    return [value for value in values if inspect.ismodule(value)]


@pytest.mark.parametrize("name", [*BLOCKS, "planning", "errors", "groups", "layout", "testing"])
def test_every_public_name_has_a_page(name):
    """The page of the API lists `__all__` by itself, of what has a docstring to show."""
    package = importlib.import_module(f"primeblocks.{name}")
    modules = [package, *_namespaces(package)]
    if name == "testing":
        modules = [importlib.import_module(f"primeblocks.testing.{each}") for each in dir(package)]
    page = (ROOT / "docs" / "api" / f"{name}.md").read_text()
    prose = ROOT / "docs" / f"{name}.md"
    text = page + (prose.read_text() if prose.exists() else "")
    words = set(re.findall(r"\w+", text))
    for module in modules:
        assert f".. automodule:: {module.__name__}\n" in page
        values = {each: getattr(module, each) for each in module.__all__}
        bare = {
            each
            for each, value in values.items()
            if not inspect.ismodule(value)
            if not (inspect.isclass(value) or inspect.isroutine(value)) or not value.__doc__
        }
        assert bare <= words, f"no docstring, and not in docs/{name}.md: {bare - words}"


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_shows_fifteen_names_at_most(block):
    package = importlib.import_module(f"primeblocks.{block}")
    sizes = {module.__name__: len(module.__all__) for module in (package, *_namespaces(package))}
    assert {name: size for name, size in sizes.items() if size > MAX_NAMES} == {}


def test_every_adapter_has_a_page():
    pages = [ROOT / "docs" / "api" / f"{name}.md" for name in ("adapters", "contrib")]
    page = "".join(each.read_text() for each in pages)
    adapters = [
        _module(path.relative_to(PACKAGE).as_posix())
        for path in PACKAGE.glob("*/adapters/*")
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    ]
    assert len(adapters) > 10
    assert [name for name in adapters if f".. automodule:: {name}\n" not in page] == []


MOST_WORDS = 1200


@pytest.mark.parametrize("block", BLOCKS)
def test_a_guide_is_short_and_leads_to_its_limits_and_its_evidence(block):
    text = (ROOT / "docs" / f"{block}.md").read_text()
    prose = re.sub(r"^(`{3,}).*?^\1|^---.*?^---|[|]", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= MOST_WORDS
    (hidden,) = re.findall(r"^```{toctree}\n:hidden:\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob(f"{block}_*.md")}
    assert {f"{page}.md" for page in hidden.split()} == pages
    assert f"{block}_evidence.md" in pages


def _repository_files():
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_module_hides_a_name():
    """A module that is imported after its package replaces what the package has of that name."""
    hidden = set()
    for file in (file for file in FILES if file.endswith("__init__.py")):
        imported, package = {*_imported(file)}, _module(file)
        for name in _declared(file) or ():
            own = {f"{package}.{name}", f"{package}.{name}.{name}"}
            if file.replace("__init__", name) in FILES and not own & imported:
                hidden.add(f"{package}.{name}")
    assert hidden == set()


def test_files_are_small():
    too_long = {}
    for file in _repository_files():
        name = file.relative_to(ROOT).as_posix()
        limit = MAX_EXAMPLE_LINES if name.startswith("examples/") else MAX_LINES
        if file.suffix == ".py" and (lines := len(file.read_text().splitlines())) > limit:
            too_long[name] = lines
    assert too_long == {}


def test_no_file_knows_somebodys_machine():
    path = re.compile(r"(?<![\w.:/)}>])/(?:work|root|home|Users|mnt)/\w")
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()[:80]}"
        for file in _repository_files()
        for line in file.read_text(errors="ignore").splitlines()
        if path.search(line)
    ]
    assert found == []


def test_notebooks_are_stored_without_outputs():
    notebooks = [file for file in _repository_files() if file.suffix == ".ipynb"]
    with_outputs = [
        file.name
        for file in notebooks
        if re.search(r'"outputs": \[\s*[^\]\s]|"execution_count": \d', file.read_text())
    ]
    assert with_outputs == []


def test_notebooks_begin_with_a_picture():
    """Stored, or drawn by a first cell whose code is folded."""
    notebooks = [file for file in _repository_files() if file.suffix == ".ipynb"]
    assert len(notebooks) == 7
    for file in notebooks:
        intro, first, *_ = json.loads(file.read_text())["cells"]
        draws = "plt.subplots(" in "".join(first["source"])
        folded = "hide-input" in first["metadata"].get("tags", [])
        stored = re.search(r"!\[.+\]\((\w+\.svg)\)", "".join(intro["source"]))
        assert (stored and file.with_name(stored[1]).exists()) or (draws and folded), file.name


def test_the_remedy_for_a_missing_package_is_an_extra():
    """All but three packages, which docs/install.md names: no build on PyPI fits every machine."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    calls = [
        (file, ast.unparse(node.func), node)
        for file in FILES
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Call)
    ]
    raised = [(file, node) for file, name, node in calls if name.endswith("MissingPackageError")]
    arguments = [(file, argument) for file, node in raised for argument in node.args[1:]]
    arguments += [(file, node.keywords[0].value) for file, name, node in calls if name == "needs"]
    named = {(file, each.value) for file, each in arguments if isinstance(each, ast.Constant)}
    assert len(named) > 5
    assert {(file, extra) for file, extra in named if extra not in extras} == set()
    without = {
        ast.unparse(node.args[0]).strip("'").lower().replace("_", "")
        for _, node in raised
        if len(node.args) == 1
    }
    assert without == {"deepep", "deepgemm", "mooncake"}
    page = (ROOT / "docs" / "install.md").read_text().lower().replace("_", "").replace("\n", " ")
    assert "the adapters of deepep, deepgemm and mooncake have no extra" in page
    assert all(node.keywords or len(node.args) > 1 for _, node in raised)
