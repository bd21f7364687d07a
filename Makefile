# Needs python3 (3.11 or newer) with venv and pip, and make. Everything is installed into .venv.
PYTHON ?= python3
INSTALLED := .venv/installed

SEED ?= 1
ENGINE ?= embedded
HWRL_embedded := .venv/bin/hwrl
HWRL_vllm := ci/vllm hwrl
OPTIONS_vllm := 'rollout.engine_options={kv_cache_memory_bytes: 67108864, enforce_eager: true}'
POINTS ?= 10000
CRASH_SEED ?= 0
FAULT_POINTS := $(if $(filter-out file,$(origin POINTS)),--points $(POINTS))
FAULT_SEED ?= 0
START ?= 0
DEMO := demo/seed-$(SEED)

# Some images of containers forbid bytecode. Every one of the thousands of processes of the tests would then compile hwrl.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo check docs test test-all test-wheel test-npu test-vllm test-stacks crash-test fault-test soak chaos odd-machines matrix release clean

help:
	@echo "make demo    make a tiny model and a data set, and train: reward from below 0.2 to above 0.9 (SEED=1 ENGINE=vllm)"
	@echo "make check   lint, types and all tests on the tree"
	@echo "make test    make check, and beside it make test-wheel and make test-npu"
	@echo "make test-all   the same with the tests marked extended, which repeat others with more sizes"
	@echo "make test-wheel the tests of packaging on the built wheel"
	@echo "make test-npu   the Ascend backend on the real torch_npu over a simulated CANN; needs g++"
	@echo "make test-vllm  the tests of rollout on vLLM, which it installs into .venv-vllm"
	@echo "make test-stacks  the tests inside each stack of ci/stacks, in its own environment; make test-stack-verl runs those of one"
	@echo "make crash-test  crash a save at POINTS=10000 places, and look at what is left after each (POINT=... repeats one)"
	@echo "make fault-test  inject POINTS=n of the faults in docs/faults.md into running jobs, and judge each (POINT=name repeats one)"
	@echo "make chaos MINUTES=30  a fault every 20 s in a run on two hosts, beside an undisturbed run; needs root and iproute2 (SEED=1)"
	@echo "make odd-machines  the demo's first steps on 15 odd machines (no IPv6, 64 MB of /dev/shm, a load of 20, ...), in one table"
	@echo "make soak    VERSIONS=2000 weight versions over three receivers, which are killed in turns: nothing may leak"
	@echo "make test-stack-ascend  the engine on the real vLLM and vllm-ascend over a simulated CANN; 1 GB of wheels, needs g++"
	@echo "make test-stack-openreg OPENREG=DIR  the tests on PyTorch's reference device, which you have built in DIR"
	@echo "make test-stack-vulkan  the tests on a device from PyPI, over Mesa's driver for the processor (apt install mesa-vulkan-drivers libvulkan1)"
	@echo "make matrix  one table of features and backends, from the conformance kit on each backend that runs here (LEVEL=rollout)"
	@echo "make docs    the docs as a site, build/site/index.html"
	@echo "make release wheel, source archive and release notes in dist/, checked and tried; nothing is uploaded"
	@echo "make clean   remove .venv, .venv-* and everything that was built"

install: $(INSTALLED)

# An editable install notes the entry points once, so a changed pyproject.toml installs again.
$(INSTALLED): pyproject.toml plugins/hwrl_bench/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hwrl needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	ci/install .venv/bin/python -e '.[dev]' -e plugins/hwrl_bench
	@touch $@

# Exit status 0 only if the goals in the demo's configuration were reached.
demo: $(INSTALLED)
	.venv/bin/python -m hwrl.run.demo $(DEMO) --seed $(SEED)
	rm -rf $(DEMO)/run
	$(HWRL_$(ENGINE)) train $(DEMO)/config.yaml rollout.engine=$(ENGINE) $(OPTIONS_$(ENGINE))

check: $(INSTALLED)
	ci/check $(TESTS)

test-wheel: $(INSTALLED)
	ci/wheel

test-npu: $(INSTALLED)
	ci/npu $(TESTS)

test: $(INSTALLED)
	ci/test $(TESTS)

test-all: TESTS := -m ''
test-all: export EXTENDED := yes
test-all: test

# `make -k test-stacks` goes on after a stack with a failure. A stack's tests are in tests/plugins, or in the part's own folder.
test-stacks: test-stack-ascend $(patsubst ci/stacks/%.txt,test-stack-%,$(filter-out ci/stacks/release.txt,$(wildcard ci/stacks/*.txt)))

test-stack-%: $(INSTALLED)
	ci/stack $* python -m pytest $(or $(wildcard tests/plugins/$*),tests/$*)

test-stack-memory: $(INSTALLED)
	ci/stack memory python -m pytest tests/memory/test_offload_stacks.py

# The oldest torch; `make test-stack-torch TORCH=torch==2.11.0` for another one.
TORCH ?= torch
test-stack-torch: $(INSTALLED)
	ci/stack $(TORCH) python -m pytest -m "not extended" -n 2 --dist worksteal tests/comm tests/memory tests/weights \
	    tests/checkpoint tests/train tests/interfaces

# `make test-stack-openreg OPENREG=DIR`: PyTorch's reference device as DIR/torch_openreg, built by you (docs/requirements.md).
test-stack-openreg: $(INSTALLED)
	@test -d "$(OPENREG)/torch_openreg" || { echo "make test-stack-openreg OPENREG=DIR: there is no DIR/torch_openreg; build it first (docs/requirements.md)" >&2; exit 2; }
	PYTHONPATH="$(abspath $(OPENREG))" .venv/bin/python -m pytest -m '' tests/backends/test_openreg.py

test-stack-ascend: $(INSTALLED)
	ci/ascend

test-vllm: test-stack-vllm

odd-machines: $(INSTALLED)
	ci/odd-machines

# Without --quiet: it hides the warnings from --strict, too.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 ci/stack docs mkdocs build --strict --config-file ci/docs/mkdocs.yml
	@echo "open build/site/index.html; with search: python3 -m http.server -d build/site"

LEVEL ?= rollout
matrix: $(INSTALLED)
	.venv/bin/python ci/matrix.py --level $(LEVEL) $(REPORTS)

crash-test: $(INSTALLED)
	.venv/bin/python -m tests.crash.sweep --points $(POINTS) --seed $(CRASH_SEED) --start $(START) $(if $(POINT),--only $(POINT))

fault-test: $(INSTALLED)
	.venv/bin/python -m tests.faults.sweep $(FAULT_POINTS) --seed $(FAULT_SEED) $(if $(POINT),--only $(POINT))

MINUTES ?= 30
chaos: $(INSTALLED)
	.venv/bin/python -m tests.faults.chaos --minutes $(MINUTES) --seed $(SEED)

VERSIONS ?= 2000
soak: $(INSTALLED)
	.venv/bin/python -m tests.soak --versions $(VERSIONS)

release: $(INSTALLED)
	ci/stack release python ci/release.py

clean:
	rm -rf .venv .venv-* build dist demo .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
