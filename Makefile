# make demo: set up and fine-tune the bundled model.   make test: set up and pass the tests.   Both need only Python >= 3.11.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/finetune

# Gigabytes where torch's wheel of the lowest version is for CUDA.
LOWEST := .venv-lowest

.PHONY: demo test test-lowest check docs setup setup-test setup-check ui clean

demo: setup
	$(RUN) run recipes/tiny-cpu.yaml
	$(RUN) eval latest

test: setup-test
	$(VENV)/bin/python -m pytest

test-lowest: # the quick tests, with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -q -c constraints-lowest.txt -e '.[test]'
	$(LOWEST)/bin/python scripts/floor_names.py
	$(LOWEST)/bin/python -m pytest -m "not slow"

check: setup-check docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff check --preview --select PLW1514 finetune app  # each text file names its encoding
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python docs/generate.py --check --quick

docs: setup-check
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

ui: setup
	$(RUN) ui

setup: $(VENV)/.installed
setup-test: $(VENV)/.installed-test
setup-check: $(VENV)/.installed-check

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.installed-check: $(VENV)/.installed-test
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
