# Every target works from a fresh clone: it makes .venv and installs what it needs with the pins of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint format bench bench-allocator claims clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engine,cli,serve,plan,dev]'
	@touch $@

install: $(INSTALLED)  ## make .venv with everything in it

demo: $(INSTALLED)  ## many chats out of one small page pool, on a real model
	$(BIN)/pagedkv demo

test: $(INSTALLED)  ## the test suite (slow tests left out)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(INSTALLED)  ## the tests that take minutes; SLICE="expression" picks some, as pytest's -k; EXAMPLES=N runs long
	$(BIN)/python -m pytest -m slow $(if $(SLICE),-k "$(SLICE)")

lint: $(INSTALLED)  ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## the benchmarks: tables, and build/bench/NAME.json
	$(BIN)/python -m benchmarks

bench-allocator: $(INSTALLED)  ## the allocator against vLLM's KVCacheManager, in turn on one core
	$(BIN)/python -m benchmarks allocator

claims: $(INSTALLED)  ## look into what texts claim about paged KV caches, and write docs/claims.md
	$(BIN)/python -m benchmarks.claims

clean:  ## remove .venv and build output
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache
