.DEFAULT_GOAL := help
.PHONY: help install demo test lint lock down clean

BIN := .venv/bin

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: ## .venv with everything in it (TRIVET_DEVICE=cpu: the CPU build although there is a GPU)
	@infra/install.sh

demo: install ## a question about a picture, from a tiny model (KEEP=1: leave it running)
	@KEEP=$(KEEP) infra/demo.sh

test: install ## all tests
	@infra/test.sh

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

RESOLVE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
	--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
# The marker that every line carries says only what is locked for.
SHORTEN := sed -i "s/ ; python_full_version < '3.13' and ((platform_machine == 'aarch64' and sys_platform == 'linux') or \
	(platform_machine == 'x86_64' and sys_platform == 'linux'))$$//"

# Beside pyproject.toml's: what has an environment of its own in the tests.
APART := $(wildcard tests/clients/*/requirements.in) tests/gpu_runner/requirements.in

lock: install ## requirements/*.lock and those of the tests' own environments, made again (UPGRADE=1: with the newest releases)
	$(RESOLVE) pyproject.toml requirements/unseen.in --extra cpu --extra test \
		--override requirements/overrides.txt --no-emit-package torch -o requirements/cpu.lock
	$(RESOLVE) pyproject.toml --extra gpu --extra test -o requirements/gpu.lock
	for wanted in $(APART); do $(RESOLVE) $$wanted -o $${wanted%.in}.lock || exit 1; done
	$(SHORTEN) requirements/cpu.lock requirements/gpu.lock $(APART:.in=.lock)

down: ## stop what `trivet up` and `make demo KEEP=1` left running
	$(BIN)/trivet down

clean: ## remove .venv, the run state and all caches
	@if [ -x $(BIN)/trivet ]; then $(BIN)/trivet down || true; fi
	rm -rf .venv .trivet .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
