PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup run test bench proto clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with everything pinned in constraints.txt

# setuptools comes first and from the pins, so that building the project downloads nothing of its own.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

run: setup ## Run a broker on 127.0.0.1:9092 with everything under ./data
	$(BIN)/drayd broker

test: setup ## Lint, check types and run every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

bench: setup ## Measure the metadata stores, the write path, columns, compaction, and a broker and groups beside Apache Kafka
	$(BIN)/python -m bench.metadata
	$(BIN)/python -m bench.wal
	$(BIN)/python -m bench.columns
	$(BIN)/python -m bench.compactor
	$(BIN)/python -m bench.broker
	$(BIN)/python -m bench.groups

# The mypy plugins are found through PATH.
proto: export PATH := $(CURDIR)/$(BIN):$(PATH)
proto: setup ## Regenerate what the .proto files say
	python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. dray/metadata/proto/*.proto dray/index/*.proto dray/groups/*.proto
	python -m grpc_tools.protoc -I. --grpc_python_out=. --mypy_grpc_out=. dray/metadata/proto/*.proto

clean: ## Remove what setup and the tools made; data/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
