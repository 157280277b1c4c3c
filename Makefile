# Every target does its own set-up in a local virtual environment; it needs Python >= 3.11 and make.
# `check` needs the symbolic links of the package tree: clone with git, on a system that has them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARITY := .venv-parity
OFFICIAL := .venv-official
GENAI := .venv-genai
OPTIMUM := .venv-optimum
JAVASCRIPT := .venv-javascript
NEWEST := .venv-newest
WHEEL := .venv-wheel
RELEASE := .venv-release
DOCS := .venv-docs
GRAPHS ?= 2000
SEED := $(or $(SEED),$(shell date +%s))
EXAMPLES := $(filter-out examples/command.py,$(wildcard examples/*.py))
QUESTIONS := $(filter-out bench/kernel_tables.py bench/probed_kernels.py bench/exports.py bench/on_cuda.py bench/models_on_cuda.py,$(wildcard bench/*.py))
CLIENT := $(BIN)/python -m pytest -m "not parity" -rs
SWIFTSHADER := /usr/lib/chromium/vk_swiftshader_icd.json
OLDER := 1.16.3 1.23.2 webgpu-1.25.1
NEWEST_OF := onnxruntime onnx onnx-ir onnxscript
HERE := not parity and not checkers and not cuda and not webgpu
TESTS := $(HERE) and not exhaustive
# What no test imports is never compiled, which takes pip longer than all else it does.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
PIP_INSTALL := $(PIP) -c constraints.txt

# Each process that a test starts would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PRECIOUS: %/bin/python
.PHONY: help demo examples test exhaustive test-newest test-clients test-trainer test-genai test-optimum test-javascript test-ray test-cuda test-webgpu test-reported test-wheel fuzz fuzz-files conformance check check-wheel parity parity-smoke bench goldens docs clean

help: ## this list
	@echo "usage: make TARGET [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-demo ## train, optimize, export and run a small decoder: under 3 minutes
	$(BIN)/python examples/demo.py

examples: $(VENV)/.ready-examples ## the demo, and all tasks and experiments of examples/: under an hour
	for example in $(EXAMPLES); do $(BIN)/python "$$example" || exit; done

test: $(VENV)/.ready-test ## all tests except those that need torch or a GPU
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "$(TESTS)"

# Only the upgrade ignores constraints.txt, which would hold pip to older versions.
test-newest: $(NEWEST)/bin/python ## the same tests with the newest onnxruntime, onnx, onnx-ir and onnxscript
	@echo "make: installing graphgen-onnx[cpu,test] and the newest $(NEWEST_OF) into $(NEWEST)"
	@grep -vE "$$(printf '^%s==|' $(NEWEST_OF))^$$" constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST)/bin/python $(PIP) -c $(NEWEST)/constraints.txt -e '.[cpu,test]'
	@$(NEWEST)/bin/python $(PIP) --upgrade $(NEWEST_OF)
	@$(NEWEST)/bin/python -m pip freeze | grep '^onnx'
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadfile -m "$(TESTS)"

test-clients: test-trainer test-genai test-optimum test-javascript ## all clients of our files, listed next: about 5 minutes

test-trainer: $(VENV)/.ready-test $(OFFICIAL)/.ready ## the official trainer, 1.19.2, on our artifacts
	@if test -e $(OFFICIAL)/.ready; then export GRAPHGEN_OFFICIAL_PYTHON=$(OFFICIAL)/bin/python; fi; \
	    $(CLIENT) tests/clients/test_clients.py tests/targets/test_targets.py tests/export/test_checkpoint.py

test-genai: $(VENV)/.ready-test $(GENAI)/.ready ## onnxruntime-genai
	GRAPHGEN_GENAI_PYTHON=$(abspath $(GENAI))/bin/python $(CLIENT) tests/clients/test_client_genai.py

test-optimum: $(VENV)/.ready-test $(OPTIMUM)/.ready ## optimum-onnx, against transformers
	GRAPHGEN_OPTIMUM_PYTHON=$(abspath $(OPTIMUM))/bin/python $(CLIENT) tests/clients/test_client_optimum.py

test-javascript: $(VENV)/.ready-test $(VENV)/.ready-webgpu $(JAVASCRIPT)/.ready ## transformers.js in Node, onnxruntime-web in Chromium
	@if test -e $(JAVASCRIPT)/.ready; then export GRAPHGEN_NODE_FOLDER=$(JAVASCRIPT); fi; \
	    if test -e $(SWIFTSHADER); then export VK_ICD_FILENAMES=$(SWIFTSHADER) \
	    ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1; fi; \
	    $(CLIENT) tests/clients/test_client_javascript.py \
	    tests/clients/test_training_in_javascript.py tests/laboratory/test_page_in_chromium.py

test-ray: $(VENV)/.ready-test $(VENV)/.ready-ray ## batch inference on two workers of Ray, killing one
	$(BIN)/python -m pytest -m "not parity" -rs tests/batch/test_map.py

# Without a GPU the tests skip, and say so.
test-cuda: .venv-cuda/.ready ## the CUDA provider, on a machine with a GPU
	.venv-cuda/bin/python -m pytest -n 2 -m cuda -rs tests/devices tests/base/test_runtime.py

# A GPU needs its own Vulkan driver: without Chromium's software device the tests skip, and say so.
test-webgpu: $(VENV)/.ready-test $(VENV)/.ready-webgpu ## the WebGPU provider, on the software device that Chromium brings
	@test -e $(SWIFTSHADER) || { command -v apt-get >/dev/null && test "$$(id -u)" = 0 && apt-get update -qq && \
	    apt-get install -y -qq chromium libvulkan1 >/dev/null; } || echo "make: there is no $(SWIFTSHADER):" \
	    "install chromium and libvulkan1"
	@if test -e $(SWIFTSHADER); then export VK_ICD_FILENAMES=$(SWIFTSHADER) \
	    ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1; fi; $(BIN)/python -m pytest -n 2 -m webgpu -rs tests/devices

test-reported: $(VENV)/.ready-test $(OLDER:%=.venv-onnxruntime-%/.ready) ## bisect finds reported faults of older onnxruntimes
	@if test -e $(SWIFTSHADER); then export VK_ICD_FILENAMES=$(SWIFTSHADER); fi; \
	    GRAPHGEN_ONNXRUNTIMES=$(CURDIR) $(BIN)/python -m pytest -rs tests/laboratory/test_reported.py

# pytest as a program, not as a module: this folder must not hide what is installed.
test-wheel: ## build sdist and wheel into dist/, and try the wheel in a new environment: make test-wheel PYTHON=python3.13
	@rm -rf $(RELEASE) dist && $(MAKE) --no-print-directory $(RELEASE)/bin/python
	@$(RELEASE)/bin/python $(PIP) build twine pytest
	$(RELEASE)/bin/python -m build
	$(RELEASE)/bin/python -m twine check --strict dist/*
	@$(RELEASE)/bin/python $(PIP) "$$(echo dist/*.whl)[cpu,html]"
	cd tests && ../$(RELEASE)/bin/python -P -c "import graphgen; print(graphgen.__file__)" | grep site-packages
	$(RELEASE)/bin/pytest -p no:cacheprovider tests/test_readme.py

fuzz: $(VENV)/.ready-test ## 2,000 new random graphs and as many programs: make fuzz [GRAPHS=500] [SEED=7]
	@echo "again with: make fuzz GRAPHS=$(GRAPHS) SEED=$(SEED)"
	GRAPHS=$(GRAPHS) $(BIN)/python -m pytest -n 2 --dist load tests/test_fuzz.py tests/test_fuzz_dsl.py \
	    tests/test_fuzz_gradients.py tests/base/test_fuzz_sizes.py \
	    --hypothesis-seed=$(SEED) -rP

exhaustive: $(VENV)/.ready-test ## the tests and cases that `make test` leaves out
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "$(HERE) and exhaustive"

fuzz-files: $(VENV)/.ready-test ## 2,000 new damaged files, each read by a command: make fuzz-files [GRAPHS=500] [SEED=7]
	$(BIN)/python tests/test_fuzz_files.py --count $(GRAPHS) --seed $(SEED) --jobs 2

conformance: $(VENV)/.ready-test ## ONNX's own 2,000 tests; rewrites docs/conformance.md: about 5 minutes
	$(BIN)/python tests/conformance.py --page

check: $(VENV)/.ready-dev ## ruff, mypy --strict and pyright, here and on an editable install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -m checkers tests/test_architecture.py
	@$(MAKE) --no-print-directory check-wheel

check-wheel: $(WHEEL)/.ready ## mypy --strict and pyright on programs of users, with the built wheel
	@rm -rf $(WHEEL)/dist
	$(BIN)/python -m hatchling build --target wheel --directory $(WHEEL)/dist
	@$(BIN)/python -m pip --python $(WHEEL)/bin/python install --quiet --no-deps \
	    --disable-pip-version-check --force-reinstall $(WHEEL)/dist/*.whl
	GRAPHGEN_WHEEL_PYTHON=$(abspath $(WHEEL))/bin/python \
	    $(BIN)/python -m pytest -rs tests/test_typed_programs.py

parity: parity-smoke ## remake all fixtures with torch, compare them, and run the tests that need torch
	$(PARITY)/bin/python tests/fixtures/make_exports.py --check
	$(PARITY)/bin/python tests/fixtures/make_checkpoints.py --check
	$(PARITY)/bin/python -m pytest -m parity || [ $$? = 5 ]  # 5: there are none

parity-smoke: $(PARITY)/.ready-parity ## remake the first fixtures with torch and compare them
	$(PARITY)/bin/python tests/fixtures/make_reference.py --check
	$(PARITY)/bin/python tests/fixtures/make_exports.py --check --only bert
	$(PARITY)/bin/python tests/fixtures/make_layer.py --check

bench: $(PARITY)/.ready-bench ## answer the questions of bench/, one table each: several hours
	for question in $(QUESTIONS); do $(PARITY)/bin/python "$$question" || exit; done

goldens: $(VENV)/.ready-test ## rewrite the text goldens and the tables of docs/; review them with git diff
	$(BIN)/python tests/test_goldens.py --remake
	$(BIN)/python tests/models/test_checkpoint_page.py --remake
	$(BIN)/python tests/models/test_architecture_page.py --remake
	$(BIN)/python tests/passes/test_pass_page.py --remake
	$(BIN)/python tests/test_readme.py --remake
	$(BIN)/python tests/test_architecture.py --remake

docs: $(DOCS)/.ready ## the documentation as a site of static files, build/site/index.html
	OMP_NUM_THREADS=1 $(DOCS)/bin/python -m sphinx -q -W --keep-going -E -c docs/site docs build/site -d build/site-trees

clean: ## remove everything that the other targets made
	rm -rf $(VENV) .venv-* *.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# One stamp for each extra: changed dependencies are installed again.
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "make: installing graphgen-onnx[cpu,$*] into $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) -e '.[cpu,$*]'
	@touch $@

$(DOCS)/.ready: pyproject.toml constraints.txt | $(DOCS)/bin/python
	@echo "make: installing graphgen-onnx[cpu,docs] into $(DOCS)"
	@$(DOCS)/bin/python $(PIP_INSTALL) -e '.[cpu,docs]'
	@touch $@

$(PARITY)/.ready-%: pyproject.toml constraints.txt | $(PARITY)/bin/python
	@echo "make: installing graphgen-onnx[cpu,$*] into $(PARITY)"
	@$(PARITY)/bin/python $(PIP_INSTALL) -e '.[cpu,$*]'
	@touch $@

.venv-cuda/.ready: pyproject.toml constraints.txt | .venv-cuda/bin/python
	@echo "make: installing graphgen-onnx[gpu,test] into .venv-cuda"
	@.venv-cuda/bin/python $(PIP_INSTALL) -e '.[gpu,test]'
	@touch $@

# Without a wheel (there are none above Python 3.12) there is no client to test, and no failure.
$(OFFICIAL)/.ready: | $(OFFICIAL)/bin/python
	@echo "make: installing onnxruntime-training-cpu 1.19.2 into $(OFFICIAL)"
	@$(OFFICIAL)/bin/python $(PIP) --no-deps \
	    onnxruntime-training-cpu==1.19.2 "numpy<2" && touch $@ || { echo "make: skipped:" \
	    "onnxruntime-training-cpu 1.19.2 cannot be installed for $$($(OFFICIAL)/bin/python -V);" \
	    "give PYTHON=python3.12"; rm -rf $(OFFICIAL); }

# Without a wheel (1.16.3 has none above Python 3.11) its faults are skipped, and nothing fails.
.venv-onnxruntime-%/.ready: | .venv-onnxruntime-%/bin/python
	@echo "make: installing onnxruntime $* into $(@D)"
	@$(@D)/bin/python $(PIP) onnxruntime==$* "numpy<2" && touch $@ || \
	    { echo "make: skipped: onnxruntime $* cannot be installed for $$($(@D)/bin/python -V); give PYTHON=python3.11"; \
	    rm -rf $(@D); }

# WebGPU is built into this one. The tests put its folder before the installed onnxruntime.
.venv-onnxruntime-webgpu-%/.ready: | $(BIN)/python
	@echo "make: installing onnxruntime-webgpu $* into $(@D)"
	@$(BIN)/python $(PIP) --no-deps --target $(@D) \
	    onnxruntime-webgpu==$* && touch $@ || { echo "make: skipped: onnxruntime-webgpu $* cannot be" \
	    "installed for $$($(BIN)/python -V)"; rm -rf $(@D); }

# It borrows the libraries of the other environment, where graphgen itself is an editable install.
$(WHEEL)/.ready: $(VENV)/.ready-dev
	@$(BIN)/python -m venv --clear --without-pip $(WHEEL)
	@libraries() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	    libraries $(BIN)/python > "$$(libraries $(WHEEL)/bin/python)/borrowed.pth"
	@touch $@

$(GENAI)/.ready: | $(GENAI)/bin/python
	@echo "make: installing onnxruntime-genai 0.18.0 into $(GENAI)"
	@$(GENAI)/bin/python $(PIP_INSTALL) onnxruntime-genai==0.18.0
	@touch $@

# This client needs transformers 4; constraints.txt has 5.
$(OPTIMUM)/.ready: | $(OPTIMUM)/bin/python
	@echo "make: installing optimum-onnx 0.1.0 and torch 2.13.0 into $(OPTIMUM)"
	@$(OPTIMUM)/bin/python $(PIP) optimum-onnx==0.1.0 \
	    optimum==2.1.0 transformers==4.57.6 onnxruntime==1.32.0 torch==2.13.0
	@touch $@

$(JAVASCRIPT)/.ready:
	@if ! command -v npm >/dev/null; then echo "make: skipped: npm is missing:" \
	    "install Node.js 20 or newer with npm"; else \
	    echo "make: installing @huggingface/transformers 4.3.1 into $(JAVASCRIPT)" && \
	    ONNXRUNTIME_NODE_INSTALL=skip npm install --prefix $(JAVASCRIPT) --no-audit --no-fund \
	    --loglevel=error @huggingface/transformers@4.3.1 && touch $@; fi

# Without ensurepip a venv stays half made; the next run must not take it for a whole one.
%/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing:" \
	    "install the system package python3 (3.11 or newer), or give PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make:" \
	    "$(PYTHON) is $$($(PYTHON) -V), wanted 3.11 or newer: give PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make" \
	    "virtual environments: install the system package python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv $* || { rm -rf $*; exit 2; }
