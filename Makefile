# make demo: set up and fine-tune the bundled model.   make test: set up and pass the tests.   Both need only Python >= 3.11.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/finetune

.PHONY: demo test setup setup-test ui clean

demo: setup
	$(RUN) run recipes/tiny-cpu.yaml
	$(RUN) eval latest

test: setup-test
	$(VENV)/bin/python -m pytest

ui: setup
	$(RUN) ui

setup: $(VENV)/.installed
setup-test: $(VENV)/.installed-test

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
