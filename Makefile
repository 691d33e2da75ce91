# `make demo` and `make test` work from a clean clone: they set up a virtual environment first.
# Linux takes MLX's CPU backend; `make demo BACKEND=cuda13` takes CUDA. macOS needs no backend.

PYTHON ?= python3
VENV ?= .venv
BACKEND ?= $(if $(filter Linux,$(shell uname -s)),cpu)
EXTRAS = $(if $(BACKEND),$(BACKEND)$(COMMA))
COMMA := ,
BIN := $(VENV)/bin
# worker processes, one a core and four at most
WORKERS ?= -n auto --maxprocesses 4 --dist worksteal
TYPED := build/typed

.PHONY: demo test test-all check format bench throughput clean

demo: $(VENV)/.installed-$(BACKEND) ## decode with the embedded pair and show that a draft changes nothing but the speed
	$(BIN)/python -m posttrainllm.evals.demo

test: $(VENV)/.developed-$(BACKEND) ## the fast tests
	$(BIN)/python -m pytest $(WORKERS)

test-all: $(VENV)/.developed-$(BACKEND) ## the slower set: the whole exactness matrix, the accept rate, packaging
	$(BIN)/python -m pytest $(WORKERS) -m slow

check: $(VENV)/.developed-$(BACKEND) ## ruff, and mypy strict on kernel/ and adapters/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/posttrainllm
	ln -s $(CURDIR)/adapters/api/* $(CURDIR)/kernel $(CURDIR)/adapters $(CURDIR)/evals $(CURDIR)/models $(TYPED)/posttrainllm/
	MYPYPATH=$(TYPED) $(BIN)/mypy -p posttrainllm.kernel -p posttrainllm.adapters -m posttrainllm

format: $(VENV)/.developed-$(BACKEND)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.developed-$(BACKEND) ## plain and speculative decoding, ours and mlx-lm's, interleaved
	$(BIN)/python -m pytest benchmarks -m "" -o filterwarnings=default $(BENCH)

throughput: $(VENV)/.developed-$(BACKEND) ## the harness of `posttrainllm bench`, and through a server, in a short form that asserts all but the speed
	PYTHON=$(BIN)/python evals/specdec-throughput.sh --short --out build/throughput
	PYTHON=$(BIN)/python evals/specdec-throughput.sh --serve --short --out build/throughput-serve

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("posttrainllm needs Python 3.11 or newer, got " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-$(BACKEND): $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".$(if $(BACKEND),[$(BACKEND)])"
	touch $@

$(VENV)/.developed-$(BACKEND): $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)dev]"
	touch $@ $(VENV)/.installed-$(BACKEND)
