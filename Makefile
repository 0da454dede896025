# make demo: set up and fine-tune the bundled model.   make test: set up and pass the tests.   Both need only Python >= 3.11.
# make test-card: the tests that need a GPU, on a stand-in that computes nothing (standin_gpu/README.md); needs g++ and 0.5 GB.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/finetune

# Gigabytes where torch's wheel is for CUDA.
LOWEST := .venv-lowest
NEWEST := .venv-newest

# The environment with torch's CUDA build; another version: make test-card TORCH=2.11.0
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
CARD := .venv-card-$(TORCH)

.PHONY: demo test test-quick test-card test-lowest test-newest check size size-store docs wheel setup setup-test setup-check setup-card charts ui clean

demo: setup
	$(RUN) run recipes/tiny-cpu.yaml
	$(RUN) eval latest

test: setup-test
	$(VENV)/bin/python -m pytest

test-quick: setup-test
	$(VENV)/bin/python -m pytest -m "not slow"

test-card: $(CARD)/.installed
	@if [ -e $(CARD)/bin/python ]; then \
	  PATH="$(CURDIR)/$(CARD)/bin:$$PATH" STAND_IN_LIBRARIES=$(CURDIR)/$(CARD)/standin_libraries \
	    $(VENV)/bin/python -m standin_gpu run --gpu rtx-4090 -- $(CARD)/bin/python -m pytest -n 1 -m "(standin or gpu) and not exhaustive" \
	    $$(grep -rlE --include="*.py" "mark\.(standin|gpu)" tests); \
	fi

test-lowest: # the quick tests, with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -q -c constraints-lowest.txt -e '.[test]'
	$(LOWEST)/bin/python scripts/floor_names.py
	$(LOWEST)/bin/python -m pytest -m "not slow"

test-newest: # the same, with the newest ones; names model types that benchmarks/reference/model_types.csv lacks
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q --upgrade --upgrade-strategy eager -e '.[test]'
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python benchmarks/model_types.py --check  # on two processes
	$(NEWEST)/bin/python -m pytest -m "not slow"

check: setup-check docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff check --preview --select PLW1514 finetune app  # each text file names its encoding
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python scripts/dependencies.py check  # hashes are of the pinned versions; licences
	$(VENV)/bin/python scripts/vague_names.py  # each local name says what its value is
	$(VENV)/bin/python docs/generate.py --check --quick
	$(PYTHON) scripts/size.py

# Ceilings are in size.json.
size: # how large the source is; fails when it has grown
	$(PYTHON) scripts/size.py

size-store: # the same, and smaller figures are the new ceilings
	$(PYTHON) scripts/size.py --store

docs: setup-check
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

wheel: # dist/*.whl and the list of what it needs, *.cdx.json; build/ would bring in what an earlier build left there
	rm -rf build dist
	$(PYTHON) -m pip wheel -q --no-deps -w dist .
	$(firstword $(wildcard $(VENV)/bin/python) $(PYTHON)) scripts/dependencies.py sbom
	@[ -e app/fetched/uplot.js ] || echo "This wheel has no charts: uPlot could not be fetched."

charts: setup # what the install could not fetch
	$(VENV)/bin/python -m pip install -q --no-deps -e .
	@[ -e app/fetched/uplot.js ] || { echo "uPlot could not be fetched."; exit 1; }

ui: setup
	$(RUN) ui

setup: $(VENV)/.installed
setup-test: $(VENV)/.installed-test
setup-check: $(VENV)/.installed-check
setup-card: $(CARD)/.installed

# Each installs what those before it install. The install fetches the charts' uPlot and font, too; pip -q hides what a build says.
# Kernels of delta nets, where there is a GPU for them.
$(VENV)/.installed: EXTRAS = ui$(shell nvidia-smi -L >/dev/null 2>&1 && echo ,hybrid)
$(VENV)/.installed-test: EXTRAS = test
$(VENV)/.installed-check: EXTRAS = test,docs
$(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-check: pyproject.toml constraints.txt package-lock.json
	[ -e $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	@[ -e app/fetched/uplot.js ] || echo "The page has no charts: uPlot could not be fetched. Try again: make charts"
	touch $(VENV)/.installed $(if $(findstring test,$(EXTRAS)),$(VENV)/.installed-test) $@

# Without a compiler or the wheel: a line that says so; in continuous integration (CI) an error.
$(CARD)/.installed: constraints.txt $(wildcard standin_gpu/*.py standin_gpu/src/*) | $(VENV)/.installed-test
	@$(VENV)/bin/python -m standin_gpu environment --base $(VENV) --out $(CARD) --torch $(TORCH) && touch $@ || \
	  { rm -rf $(CARD); [ -z "$$CI" ] && echo "test-card is left out."; }

clean:
	rm -rf .venv .venv-* build dist site *.egg-info
