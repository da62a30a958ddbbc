"""Settings of the documentation. Build it with scripts/docs."""

from sphinx.ext.autodoc.mock import _MockModule

import primeblocks

project = "primeblocks"
author = "the primeblocks authors"
copyright = "the primeblocks authors"
version = release = primeblocks.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"primeblocks {version}"
html_static_path = ["_static"]
html_css_files = ["page.css"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Adapters have pages, and their packages need not be installed for them.
autodoc_mock_imports = [
    "cut_cross_entropy",
    "deep_ep",
    "httpx",
    "mooncake",
    "nixl",
    "numba",
    "openai",
    "openenv",
    "starlette",
    "torchtitan",
    "triton",
    "trl",
    "uvicorn",
    "verifiers",
    "vllm",
]
# They look at the version, too.
_MockModule.__version__ = property(
    lambda self: {"vllm": "0.32.0", "torchtitan": "0.3.0"}.get(self.__name__, "0")
)
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # An attribute of a docstring is not a target: two are called `bytes`.
# One backtick is code in our docstrings, as in Markdown.
default_role = "code"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Notebooks are stored without outputs, and executed here.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"  # Warnings name folders of the machine that built the pages.
# This one needs vLLM: tests/weightsync/test_vllm_verify.py runs its cells.
nb_execution_excludepatterns = ["notebooks/does_my_engine_run_my_weights.ipynb"]

nitpicky = True
# Every reference into this library resolves. The build needs no network: it fetches no inventories
# of other libraries, whose names in signatures stay without a link.
nitpick_ignore_regex = [("py:.*", r"(?!primeblocks\.).*|primeblocks\.parallel\.ancestry\.Ancestry")]


def _to_rst(app, what, name, obj, options, lines):
    """Read our docstrings as Markdown would: indented examples, bars, colons in attributes."""
    for index, line in enumerate(lines):
        example = lines[index + 1 : index + 3]
        if line.endswith(":") and len(example) == 2 and not example[0] and example[1][:1] == " ":
            lines[index] = f"{line}:"
        # `|` starts a substitution, save in code.
        parts = lines[index].split("`")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[index] = "`".join(parts)
    if what in ("attribute", "property") and lines:
        # Napoleon would take what stands before a colon for a type; an escaped space shows nothing.
        lines.insert(0, "\\ ")


def setup(app):
    app.connect("autodoc-process-docstring", _to_rst, priority=100)  # Before napoleon.
