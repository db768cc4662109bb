# Everything is set up in .venv by the first target that needs it.
PYTHON ?= python3
# How torch is installed. On a machine without a GPU the CPU build is a tenth of the size:
#   make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev

# One thread a process: two OpenMP programs that spin on two cores slow each other thirtyfold.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_DISABLE_TELEMETRY ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: demo persistent evidence finetune-demo test lint bench gpu-check gpu-bench wheel clean

demo: $(READY)  ## The main job: six arms, three seeds, transient faults; a table and an HTML report
	$(BIN)/gnmr compare demo

persistent: $(READY)  ## The second recipe: a low path that is too coarse all the time
	$(BIN)/gnmr compare persistent

evidence: $(DEV)  ## Eight seeds of every trigger in six regimes (hours, resumable), and docs/evidence.md from them
	for regime in fg fo d8 d6c b4c m6; do $(BIN)/gnmr compare evidence/$$regime --out runs/evidence/$$regime || exit 1; done
	$(BIN)/python benchmarks/evidence.py

# Every run begins with the same weights and ends with an adapter; the evaluation asks all of them the same items.
FINETUNE_RUNS = $(foreach seed,0 1 2,$(foreach arm,high low gnmr random,$(arm)-s$(seed)=runs/finetune/$(arm)-s$(seed)))

finetune-demo: $(DEV)  ## LoRA on a real model in real INT8: four arms, three seeds, six benchmarks (resumable)
	$(BIN)/python benchmarks/assets.py
	$(BIN)/gnmr compare finetune
	$(BIN)/gnmr evaluate base=build/assets/smollm2 $(FINETUNE_RUNS) --data build/assets/items --text embedded \
		--tasks hellaswag,piqa,arc_easy,mmlu,gsm8k,perplexity --limit 40 --window 256 --out runs/finetune/evaluation
	$(BIN)/python benchmarks/finetune.py

test: $(DEV)  ## Every test, docstring examples included
	$(BIN)/python -m pytest -n 2 --doctest-modules src/gnmr tests

lint: $(DEV)  ## Style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(DEV)  ## The measurements of benchmarks/README.md; nothing else should run meanwhile
	$(BIN)/python benchmarks/controller.py
	$(BIN)/python benchmarks/guard.py
	$(BIN)/python benchmarks/triggers.py
	$(BIN)/python benchmarks/int8.py

gpu-check: $(DEV)  ## The tests that need a GPU; an error if none of them ran
	$(BIN)/python -m pytest tests/gpu --gpu-must-run

gpu-bench: $(DEV)  ## What the controller costs on this GPU, at 1.3B and 8B; writes benchmarks/gpu-CARD.md
	$(BIN)/gnmr doctor
	$(BIN)/python benchmarks/gpu.py

wheel: $(DEV)  ## Build the wheel, and run its tests outside the checkout
	rm -rf dist build/outside && mkdir -p build/outside
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv --without-pip build/outside/venv
	@# The new environment borrows the libraries of .venv, and takes gnmr from the wheel.
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$(echo build/outside/venv/lib/python3.*/site-packages)/borrowed.pth
	$(BIN)/python -m pip --python build/outside/venv/bin/python install -q --no-deps dist/*.whl
	cp -r tests pyproject.toml build/outside/
	cd build/outside && venv/bin/python -c "import gnmr; assert 'build/outside' in gnmr.__file__, gnmr.__file__"
	cd build/outside && venv/bin/python -m pytest -n 2 $(WHEEL_TESTS)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): this takes a few minutes"
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.[all]'
	touch $@

$(DEV): $(READY)
	$(BIN)/python -m pip install -q --group dev
	touch $@

clean:
	rm -rf $(VENV) build dist runs
