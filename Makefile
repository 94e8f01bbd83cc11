# Two commands matter: `make quickstart` and `make test`. Each sets up everything it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WHEEL := .cache/site
CHECKED := platform searchers trainers experiments tests
PORTIONS := dpray.platform dpray.searchers dpray.trainers dpray.experiments

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0
export RAY_ENABLE_UV_RUN_RUNTIME_ENV := 0
export MLFLOW_DISABLE_TELEMETRY := true

.DEFAULT_GOAL := help
.PHONY: help install quickstart test slow-test cluster-test fault-test check lint types contract format pytest benchmark clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dpray needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(BIN)/python -m pip install -q --upgrade "pip>=24"
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install -q -e ".[dev,postgres]"
	@touch $@

install: $(STAMP)  ## set up .venv

quickstart: $(STAMP)  ## search and train on the shipped recipe, then say how to look
	$(BIN)/dpray run digits_quickstart

test: check pytest  ## everything CI checks

check: $(STAMP)  ## formatting, lint, types, import contract (through pre-commit where git is there)
	@if git rev-parse --git-dir >/dev/null 2>&1; then PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files --show-diff-on-failure; \
	else $(MAKE) --no-print-directory lint types contract; fi

lint: $(STAMP)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	@test ! -e platform/__init__.py || { echo "platform/__init__.py shadows the standard library's platform: remove it."; exit 1; }

# Type checkers and import-linter cannot follow an editable install of mapped folders: they look at the wheel.
$(WHEEL): $(STAMP) $(shell find platform searchers trainers experiments -name '*.py' -o -name '*.pyi' -o -name '*.yaml' -o -name py.typed)
	@mkdir -p .cache; rm -rf build .cache/dist $(WHEEL)
	@$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w .cache/dist . 2>.cache/wheel.log || { cat .cache/wheel.log; exit 1; }
	@$(BIN)/python -m pip install -q --no-deps --target $(WHEEL) .cache/dist/dpray-*.whl
	@rm -rf build; touch $(WHEEL)

types: $(WHEEL)
	cd .cache && MYPYPATH=site ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir mypy $(addprefix -p ,$(PORTIONS))

contract: $(WHEEL)
	PYTHONPATH=$(WHEEL) $(BIN)/lint-imports --cache-dir .cache/import-linter

format: $(STAMP)  ## rewrite the code the way `make lint` wants it
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

pytest: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n 3 --dist loadfile --no-loadscope-reorder --cov=platform/privacy --cov-branch --cov-report=term:skip-covered --cov-fail-under=95 $(PYTEST_ARGS)

slow-test: $(STAMP)  ## the long runs (about half an hour on two cores)
	$(BIN)/python -m pytest -m slow --timeout=1800 --ignore=tests/cluster --ignore=tests/faults $(PYTEST_ARGS)

cluster-test: $(STAMP)  ## three hosts in network namespaces, by hand and by `ray up` (as root, Linux; a quarter of an hour)
	@rc=0; $(BIN)/python -m pytest tests/cluster --ignore=tests/cluster/test_ray_up.py --timeout=1800 $(PYTEST_ARGS) || rc=1; \
	$(BIN)/python -m pytest tests/cluster/test_ray_up.py --timeout=1800 $(PYTEST_ARGS) || rc=1; exit $$rc

fault-test: $(STAMP)  ## kill, stop, starve and cut off runs while they are watched from outside (about a quarter of an hour)
	$(BIN)/python -m pytest -m slow -s --timeout=3600 tests/faults $(PYTEST_ARGS)

benchmark: $(STAMP)  ## rounds per second against a plain NumPy loop, and the ledger's share
	$(BIN)/python -m dpray.experiments.benchmarks.rounds

clean:  ## remove what the targets made
	rm -rf $(VENV) .cache build *.egg-info .coverage
