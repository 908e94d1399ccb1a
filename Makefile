# Waterclock's commands. A machine needs python3 (3.11 or newer, with venv) and make; `make env`
# installs the rest into .venv, once. After that everything here works without a network.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Every folder with a pyproject.toml in one of these places is a distribution.
PROJECTS := $(wildcard proto/pyproject.toml runtime/pyproject.toml services/*/pyproject.toml \
              clients/*/pyproject.toml cli/pyproject.toml lab/pyproject.toml)
PACKAGES := $(patsubst %/pyproject.toml,%,$(PROJECTS))
EDITABLES := $(addprefix -e ./,$(PACKAGES))

# The stamp's name is a checksum of what it stands for, so that a checkout that only touches
# times does not install again.
INPUTS := pyproject.toml constraints.txt $(sort $(PROJECTS))
STAMP := $(VENV)/installed-$(shell cat $(INPUTS) | cksum | tr ' ' '-')

INSTALL := --quiet --group dev $(EDITABLES)
UV_INSTALL := $(BIN)/uv pip install --python $(BIN)/python --constraints constraints.txt \
              --build-constraints constraints.txt $(INSTALL)
PIP_INSTALL := $(BIN)/python -m pip install --constraint constraints.txt \
               --build-constraint constraints.txt $(INSTALL)

.PHONY: campaign-traces help env demo up test faults campaign-faults containers check format bench bench-litellm pins clean

help:
	@echo 'make demo    a mesh on this machine, real requests through it, and what it proves'
	@echo 'make up      a mesh on this machine, until interrupted'
	@echo 'make test    all tests but the fault and the slow ones'
	@echo 'make faults  the tests that break something while the mesh runs'
	@echo 'make campaign-faults  the long form: random faults, seeded'
	@echo 'make containers  builds compose.yaml and tests it; needs Docker'
	@echo 'make check   lint, format, types, imports, house rules'
	@echo 'make bench   the benchmarks'
	@echo 'make format  rewrites the code as `make check` wants it'
	@echo 'make pins    constraints.txt anew, from the newest releases'

env: $(STAMP)

$(STAMP): $(INPUTS)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else f"Python 3.11 or newer expected, {v} found: name another one with make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# uv is quick; where it cannot be had or does not get through, pip does the same slowly.
	@{ test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --constraint constraints.txt uv; } \
	  && { $(UV_INSTALL) || $(UV_INSTALL) --offline; } \
	  || { echo 'make env: uv did not manage, trying pip' >&2; \
	       $(BIN)/python -m pip install --quiet --constraint constraints.txt pip \
	         && $(PIP_INSTALL); }
	@rm -f $(VENV)/installed-*
	@touch $@

demo: env
	$(BIN)/waterclock demo

up: env
	$(BIN)/waterclock up

test: env
	$(BIN)/python -m pytest -n 3 --dist loadfile --ignore=tests/faults -m "not slow and not faults and not bench"
	$(BIN)/python -m pytest -m bench tests/bench

faults: env
	$(BIN)/python -m pytest tests/faults -m 'not slow'

# Rounds of random faults, about half a minute each; WATERCLOCK_CAMPAIGN_SEED and
# WATERCLOCK_CAMPAIGN_ROUNDS choose which and how many.
campaign-faults: env
	$(BIN)/python -m pytest tests/faults -m slow

# Ten minutes of each public trace at ten times speed; needs the data beside the repository.
campaign-traces: env
	$(BIN)/python -m pytest -s tests/trace -m slow

# Where no Docker daemon answers, one is started from the stand-ins beside the repository if they are
# there, and keeps running; otherwise this fails and says what is missing (CI=true lets no test skip).
STAND_INS := ../shared/docker-standins/build.sh
containers: env
	@docker info >/dev/null 2>&1 || test ! -f $(STAND_INS) || \
	  { echo 'make containers: no Docker daemon answers, so $(STAND_INS) starts one, with stand-ins'; \
	    bash $(STAND_INS) python:3.11-slim-bookworm nats:2.15-alpine valkey/valkey:9; }
	CI=true $(BIN)/python -m pytest -m slow tests/containers

check: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/tidy

format: env
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: env
	$(BIN)/python bench/run.py

# The comparison with another proxy, in an environment of its own.
bench-litellm: env
	@test -x .venv-litellm/bin/python || $(PYTHON) -m venv .venv-litellm
	$(BIN)/uv pip install --quiet --python .venv-litellm/bin/python 'litellm[proxy]>=1.80,<=1.100.0'
	$(BIN)/python bench/litellm_proxy.py

# Names and exact versions only: no addresses, no hashes.
pins: env
	{ echo '# What `make env` installs, exactly. Written by `make pins`.'; \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
	    --group dev $(PROJECTS) | grep -v '^-e '; } > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
