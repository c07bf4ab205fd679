# Everything runs in the virtual environment $(VENV), which is made on first use and brought up to date when
# pyproject.toml changes. Needed beforehand: Python >= 3.11 with venv, make, git.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
# One named version: an open range may pull several GB of CUDA packages that no check uses.
TORCH  ?= torch==2.13.0

BIN    := $(VENV)/bin
# Twice quiet: errors only.
PIP    := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input
PYTEST := $(BIN)/python -m pytest

# Stamps: one per set of extras, each newer than the pyproject.toml it was installed from.
RUN    := $(VENV)/.installed-run
DEV    := $(VENV)/.installed-dev
PARITY := $(VENV)/.installed-parity
FULL   := $(VENV)/.installed-full
DOCS   := $(VENV)/.installed-docs

comma := ,

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help install demo test tests parity test-full test-everything docs constants peers lint format clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter of a new $(VENV), JOBS=4 the test processes,"
	@echo "  ARGS='-k name' is passed to pytest, TORCH=torch==2.x the PyTorch to compare with."

install: $(RUN) ## Install into $(VENV), and no more
	@echo "installed: source $(VENV)/bin/activate, then ratrainc quickstart or ratrainc --help"

demo: $(RUN) ## Train a tiny model: two stages, two replicas, real text
	@$(BIN)/ratrainc quickstart

test: lint tests ## Lint, type check and run the tests (without those marked full or parity)

tests: $(DEV)
	@$(PYTEST) -n $(JOBS) --dist loadgroup -m "not full and not parity and not everything" $(ARGS)

parity: $(PARITY) ## Compare with PyTorch (installs it)
	@$(PYTEST) -n $(JOBS) --dist loadgroup -m "parity and not full and not everything" $(ARGS)

test-full: $(if $(SHARD),,lint) $(FULL) ## Run the slow tests too, PyTorch and MPI; SHARD=2/9: that part of the slow ones
	@$(PYTEST) -n $(JOBS) --dist loadgroup -m "$(if $(SHARD),full and )not everything" $(if $(SHARD),--shard $(SHARD)) $(ARGS)

test-everything: lint $(FULL) ## Run every test there is: also those that need a browser, or break MPI jobs
	@$(PYTEST) -n $(JOBS) --dist loadgroup $(ARGS)

docs: $(DOCS) ## Write the documentation as a site, build/site/index.html
	@$(BIN)/python -m mkdocs --quiet build --strict
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

constants: $(DEV) ## Fit the constants of the built-in GPU machines to published step times, and write them
	@$(BIN)/python benchmarks/constants.py --write

peers: $(FULL) ## Compare with every peer that benchmarks/ has: a table of goals (ARGS=--quick: a trial)
	@$(BIN)/python benchmarks/peers.py $(ARGS)

lint: $(DEV) ## Check style, formatting and types
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

format: $(DEV) ## Format the code and repair what can be repaired
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

clean: ## Remove caches and build products
	@find . -path './$(VENV)' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

distclean: clean ## Remove the virtual environment as well
	@rm -rf '$(VENV)'

# Installs with a sign of life every ten seconds; the loop ends with the recipe, whatever ends that.
define install
@( seconds=0; while sleep 10 >/dev/null 2>&1; do seconds=$$((seconds + 10)); \
  echo "  still installing, $$seconds s so far"; done ) & \
  beat=$$!; trap 'kill $$beat 2>/dev/null' EXIT; trap 'exit 130' INT TERM; $(PIP) install $(1)
@touch $@
endef

# Asks for pip, not for the interpreter: where venv was interrupted, only pip is missing.
define environment
@command -v $(PYTHON) >/dev/null || { \
  echo "make: '$(PYTHON)' is not found. Name a Python >= 3.11: make PYTHON=/path/to/python3" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "make: Python >= 3.11 is needed, '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
    "Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
  echo "Making $(VENV) ..." && $(PYTHON) -m venv '$(VENV)'; }
@for folder in grammar ratrain_ir passes targets ratrainc; do \
  [ -e src/ratrain/$$folder ] || ln -s ../../$$folder src/ratrain/$$folder; done # a source archive has no links
endef

$(RUN): pyproject.toml
	$(environment)
	@echo "Installing ratrain, numpy, numba and what they need into $(VENV), which takes one to three minutes ..."
	$(call install,-e .)

$(DEV): pyproject.toml
	$(environment)
	@echo "Installing ratrain and its development tools into $(VENV), which takes a minute or two ..."
	$(call install,-e '.[dev]')
	@touch $(RUN)

$(DOCS): $(DEV)
	@echo "Installing MkDocs into $(VENV) ..."
	$(call install,-e '.[dev$(comma)docs]')

$(PARITY): $(DEV)
	@echo "Installing $(TORCH) into $(VENV) ..."
	$(call install,"$(TORCH)" -e '.[dev$(comma)parity]')

$(FULL): $(PARITY)
	@echo "Installing MPI, transformers, Triton and xDSL into $(VENV) ..."
	$(call install,"$(TORCH)" -e '.[dev$(comma)parity$(comma)transformers$(comma)mpi$(comma)triton$(comma)benchmark]')
