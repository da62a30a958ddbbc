# `make demo` and `make test` work on a fresh machine: each sets up its own virtual environment.
VENV ?= .venv
READY := $(VENV)/.ready

.PHONY: setup setup-examples demo test test-examples test-peers test-packages test-all docs
setup: $(READY)

$(READY): pyproject.toml scripts/setup requirements/cpu-overrides.txt requirements/cpu-constraints.txt
	scripts/setup $(VENV)
	touch $@

demo: setup
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/async_grpo_moe.py

test: setup
	scripts/check $(VENV)

setup-examples: setup
	$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python -r pyproject.toml --extra reasoning_gym

test-examples: setup-examples
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m example tests/integration

# Needs a virtual environment of its own.
test-peers: setup
	scripts/peers

# The wheel and the source distribution, in bare environments.
test-packages: setup
	scripts/packages $(VENV)/bin/uv

# All of these, with random tests at their stated size: hours.
test-all: setup
	scripts/check --full $(VENV)
	scripts/peers
	scripts/packages $(VENV)/bin/uv
	PYTHON=.venv-peers/bin/python benchmarks/gpu/run.sh --dry-run $$(mktemp -d)

# Without the execution of notebooks, which scripts/docs adds.
docs:
	scripts/docs --fast
