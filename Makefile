# Every target sets itself up on a machine with nothing but Python 3.11 or newer, make and a compiler.
#
#   make test PYTHON=python3.12    another interpreter, for an environment that does not exist yet
#   make test ARGS="-k rotary"     more arguments for what the target runs

PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
HALF  := $(VENV)/.half-made

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench clean distclean

help:
	@echo "make demo       continue a prompt with the package's own model"
	@echo "make test       ruff, mypy, then the tests"
	@echo "make check      ruff and mypy alone"
	@echo "make bench      run the benchmarks; each number only after its agreement check"
	@echo "make setup      make .venv with the versions in requirements.txt (the others do this themselves)"
	@echo "make clean      remove caches and builds; make distclean removes .venv as well"

setup: $(READY)

# The beginning of a class, and what openv41-mini makes of its last function.
demo: $(READY)
	@cat mini/prompt.txt
	@$(BIN)/openv41 generate --file mini/prompt.txt --max-new-tokens 64 --stop "$$(printf '\n\n ')" $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Every shape in a signature is checked while the model's parts and the operations are tested; the rest runs at full
# speed. (Exit code 5: ARGS left no test of this half.)
CHECKED := tests/model tests/ops tests/test_house.py

# The tests cap torch's threads themselves (tests/conftest.py), so that the workers do not crowd each other.
test: check
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=10 $(CHECKED) $(ARGS) || test $$? = 5
	OPENV41_JAXTYPING=0 $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=10 $(CHECKED:%=--ignore=%) $(ARGS) || test $$? = 5

bench: $(READY)
	$(BIN)/openv41 bench $(or $(NAME),attention) $(ARGS)

# .half-made stands while packages are being installed. Where it is found, the last attempt broke off and may have
# left broken packages that the installer would take for whole ones: start again from nothing. An environment without
# it is brought up to date in place, also one that somebody made by hand.
$(READY): requirements.txt pyproject.toml
	@if [ -e $(HALF) ] || ! $(BIN)/python -c 'import sys, pip; assert sys.version_info >= (3, 11)' 2>/dev/null; then \
	    $(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null || \
	        { echo "openv41 needs Python 3.11 or newer; $(PYTHON) is not: try make PYTHON=python3.12"; exit 1; }; \
	    echo "making $(VENV)"; \
	    rm -rf $(VENV) && mkdir $(VENV) && touch $(HALF) || exit 1; \
	    $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv failed: Debian and Ubuntu have it in python3-venv"; exit 1; }; \
	fi
	@touch $(HALF)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@rm $(HALF)
	@touch $@

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV)
