# `make test` and `make demo` work from a bare clone: each creates .venv and installs the package first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 1

.PHONY: demo test test-slow check bench install clean

install: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

demo: install
	bash scripts/dear/base2new_train.sh shapes $(SEED) --trainer ZeroshotCLIP
	bash scripts/dear/base2new_test.sh shapes $(SEED) --trainer ZeroshotCLIP
	bash scripts/dear/base2new_train.sh shapes $(SEED)
	bash scripts/dear/base2new_test.sh shapes $(SEED)
	$(BIN)/python scripts/report.py output/base2new

test: install
	$(BIN)/python -m pytest -q

test-slow: install
	$(BIN)/python -m pytest -q -m slow

check: install
	$(BIN)/ruff check .
	$(BIN)/python scripts/check_house.py

bench: install
	$(BIN)/python scripts/bench.py

clean:
	rm -rf build output .pytest_cache .ruff_cache
