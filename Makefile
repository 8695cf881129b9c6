# Two commands do everything on a fresh machine with Python 3.11 or newer:
#   make train     create .venv, install Bestiary, train Pong, evaluate the agent and record a video
#   make test      create .venv, install all extras, run ruff, mypy and the tests
# Further targets: test-slow (trainings of minutes), docs (documentation site in site/), bench, lint, clean
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup train test test-slow docs bench lint clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "bestiary needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version)."; \
	    echo "Try: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-all: $(VENV)/installed
	$(PIP) --editable '.[all,test,docs]'
	@touch $@

train: setup
	$(BIN)/bestiary train --preset pong

docs: $(VENV)/installed-all
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/bestiary bench

test: lint
	$(BIN)/python -m pytest --numprocesses 3 --dist loadgroup

test-slow: lint
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
