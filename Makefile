# `make demo` and `make test` work on a fresh machine: each sets up its own virtual environment.
VENV ?= .venv
READY := $(VENV)/.ready

.PHONY: setup demo test check
setup: $(READY)

$(READY): pyproject.toml scripts/setup requirements/cpu-overrides.txt requirements/cpu-constraints.txt
	scripts/setup $(VENV)
	touch $@

demo: setup
	scripts/demo $(VENV)

test: setup
	$(VENV)/bin/python -m pytest

check: setup
	scripts/check $(VENV)
