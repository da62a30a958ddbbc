# `make demo` and `make test` work on a fresh machine: each sets up its own virtual environment.
VENV ?= .venv
READY := $(VENV)/.ready

.PHONY: setup demo test docs
setup: $(READY)

$(READY): pyproject.toml scripts/setup requirements/cpu-overrides.txt requirements/cpu-constraints.txt
	scripts/setup $(VENV)
	touch $@

demo: setup
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/async_grpo_moe.py

test: setup
	scripts/check $(VENV)

docs:
	scripts/docs
