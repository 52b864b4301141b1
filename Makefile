# Two commands on a fresh machine: `make quickstart` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# Packages are installed without compiled modules, which the first import writes, even where the environment forbids it:
# else each of the tests' processes would compile torch anew, for 4 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test test-slow test-gpu check format bench accuracy docs clean

quickstart: $(VENV)/.train
	$(BIN)/ultrascale quickstart

# mypy takes a minute of one core, so it runs beside the tests; they go in two blocks, so that a file's fixtures are made once.
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"; tests=$$?; wait $$types && exit $$tests

# With the long tail: every composition of layouts, 200 drawn runs, 100 kills, and our schedules beside torch's.
test-slow: check $(VENV)/.slow
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The kernels on this machine's GPU; all other tests run on the CPU, wherever they are.
test-gpu: $(VENV)/.dev
	ULTRASCALE_TEST_GPU=1 $(BIN)/python -m pytest tests/kernels

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.base
	$(BIN)/python benchmarks/planner.py

# docs/accuracy.md, with the line that the heat map adds (some minutes).
accuracy: $(VENV)/.base
	$(BIN)/ultrascale accuracy data/published.csv --report docs/accuracy.md
	$(BIN)/python benchmarks/heatmap.py --report docs/accuracy.md

# The site of docs/, in build/site; opens from a disk.
docs: $(VENV)/.slow
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build

$(VENV)/.base: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (about half a minute the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.train: $(VENV)/.base
	@echo "Adding torch"
	$(PIP) --editable '.[train]'
	@touch $@

# In one call: pip resolves and compares versions once.
$(VENV)/.dev: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with torch and the tools of development (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev,train]'
	@touch $@

$(VENV)/.slow: $(VENV)/.dev
	@echo "Adding the engines that we export to, and the tools of the site"
	$(PIP) --editable '.[dev,dev-slow,docs,train]'
	@# torchtitan 0.2 beside the 0.3 of the dev extra: its TOML is exported too, and read by it in a test.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/torchtitan-0.2 torchtitan==0.2.2
	@touch $@
