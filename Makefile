# Two commands matter: `make lab` opens the course, `make test` checks everything that is installed.
# README.md lists the plain commands that they run.

PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?=
ARGS   ?=

bin   := $(VENV)/bin
comma := ,
empty :=
space := $(empty) $(empty)

# One stamp per set of extras, so that a second call installs nothing. "course test" is stamped course+test.
extras := course test $(subst $(comma),$(space),$(EXTRAS))
tested := $(VENV)/.installed-$(subst $(space),+,$(strip $(extras)))

.PHONY: help lab venv test notebooks site lint format portability stress clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

lab: $(VENV)/.installed-course ## open the course in JupyterLab
	$(bin)/pagedkv lab

venv: $(tested) ## make .venv with the course, the test tools and EXTRAS

test: $(tested) ## run everything that is installed; EXTRAS=all installs the heavy parts first
	$(bin)/python -m pytest $(ARGS)

notebooks: $(tested) ## execute and normalise all lessons, rewrite the course map
	$(bin)/python -m pagedkv.teach.notebooks $(ARGS)

site: $(VENV)/.installed-course ## write the course as pages that need no kernel, into site/
	$(bin)/python -m pagedkv.teach.site $(ARGS)

lint: $(tested) ## ruff, over code and notebooks
	$(bin)/ruff check .
	$(bin)/ruff format --check .

format: $(tested) ## let ruff repair what it can
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

# Some machines choose a BLAS kernel by these variables; numbers in the lessons must not depend on the choice.
portability: $(tested) ## core tests and lessons with the BLAS kernel that the processor picks
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(bin)/python -m pytest -m "not browser and not torch" --ignore=tests/notebooks $(ARGS)

stress: $(tested) ## random tests, kills, mutants and the site at full length: hours
	PAGEDKV_STRESS=1 $(bin)/python -m pytest tests $(ARGS)

clean: ## remove the environments and caches
	rm -rf $(VENV) .venvs .pytest_cache .ruff_cache .hypothesis

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pagedkv needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(bin)/python
	$(bin)/python -m pip install -q -c constraints.txt -e ".[$(subst +,$(comma),$*)]"
	@touch $@
