# The two commands of the README. Each makes the virtual environment it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARITY := .parity
RUN := projects/quickstart/$(if $(LONG),run_long,run)
CONFIG := projects/quickstart/$(if $(LONG),long,config).yaml
DATA := projects/quickstart/data
TOKENIZER := projects/quickstart/cache/tokenizer.model
FLAGS :=

# A virtual environment keeps its Python; another one would be ignored without a word.
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(call version,$(PYTHON)),$(call version,$(BIN)/python))
$(error $(VENV) has Python $(call version,$(BIN)/python), and $(PYTHON) is another: remove $(VENV) first)
endif
endif
endif

.PHONY: quickstart test test-long test-layouts test-parity lint

quickstart: $(VENV)/installed $(TOKENIZER)
	$(BIN)/python -m scalerun.cli.train $(DATA) --config $(CONFIG) --save-dir $(RUN) $(FLAGS)
	$(BIN)/python -m scalerun.cli.validate $(DATA) --path $(RUN) --json $(RUN)/valid.json
	$(BIN)/python projects/quickstart/compare.py $(DATA) $(RUN)/valid.json
	$(BIN)/python -m scalerun.cli.interactive_cli --path $(RUN) --temperature 0.5 --top-p 0.9 --max-new-tokens 160 --seed 1 < projects/quickstart/prompts.txt

# Made once: the runs depend on it.
$(TOKENIZER): | $(VENV)/installed
	$(BIN)/python -m scalerun.cli.train_tokenizer $(DATA) --vocab-size 1024 --model-type unigram --output $@

test: $(VENV)/tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long and not layouts"

test-long: $(VENV)/tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

# All architectures at all parallel layouts: most of an hour on 2 cores.
test-layouts: $(VENV)/tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m layouts cpu_tests/layouts

# Against the package torchscale, by itself in a folder: what it requires would replace torch.
test-parity: $(PARITY)/torchscale
	PYTHONPATH=$(PARITY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest cpu_tests/parity

lint: $(VENV)/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "scalerun needs Python 3.11 or 3.12, and $(PYTHON) is another; give make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	@echo "installing scalerun and torch into $(VENV): some minutes on a slow network"
	$(BIN)/pip install --editable .
	@touch $@

$(VENV)/tested: $(VENV)/bin/python pyproject.toml
	@echo "installing scalerun and what its tests need into $(VENV): some minutes on a slow network"
	$(BIN)/pip install --editable '.[test]'
	@touch $(VENV)/installed $@

$(PARITY)/torchscale: $(VENV)/tested
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(PARITY) torchscale==0.3.0
	@touch $@
