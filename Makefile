# Everything runs in .venv, built from constraints.txt. Needs python3 (3.10+, with venv) and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench soak format clean

demo: $(STAMP)  ## install, and train examples/mnist_lenet.py
	$(BIN)/python examples/mnist_lenet.py --epochs 1

test: $(STAMP)  ## install, and run all tests
	$(BIN)/python -m pytest

check: $(STAMP)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## short form of the benchmarks: hapi against loops by hand, some minutes
	$(BIN)/python benchmarks/train.py --short

soak: $(STAMP)  ## kill runs at random moments, many times: minutes to an hour
	$(BIN)/python benchmarks/resume_soak.py --kills 20

format: $(STAMP)  ## write what `check` wants of the format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and pinned: a bare `torch` pulls gigabytes of CUDA packages where none are wanted.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples,onnx]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist log output .mypy_cache .ruff_cache .pytest_cache
