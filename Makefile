# Targets for users and developers; `make help` lists them.
#
#   make demo                      the complete workflow at demo scale
#   make test ARGS="-k loader"     ARGS reaches pytest, snakemake (demo) or the benchmarks
#   make demo PYTHON=python3.12    another Python for a new environment
#   make install UV=               with pip, even if uv is installed
#   make demo ENGINE=podman        in a container of podman (or docker), without Python on this machine. IMAGE names an
#                                  existing image; without IMAGE, the engine builds an image, with options BUILD_ARGS
#
# All tools are in the virtual environment .venv. To use them in a shell: `source .venv/bin/activate`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(abspath $(VENV))/bin
PYTHON ?=
ARGS ?=
ENGINE ?=
IMAGE ?=
BUILD_ARGS ?=

# Stages run as `python -P -m dlscale`, so `python` has to be the environment's.
export PATH := $(BIN):$(PATH)
export VIRTUAL_ENV := $(abspath $(VENV))
unexport PYTHONHOME
# Without byte code, hundreds of processes would each compile the modules that they import.
unexport PYTHONDONTWRITEBYTECODE
# The demo runs on this machine, even if the user has set a profile for another machine.
unexport SNAKEMAKE_PROFILE

say = @printf '==> %s\n'

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---- environment ---------------------------------------------------------------------------------

# The Python that PYTHON names, or the first installed Python that is new enough.
$(VENV)/bin/python:
	@ok() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if ok "$$python"; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "dlscale needs Python >= 3.11; found: $$($(or $(PYTHON),python3) --version 2>&1 || true)." >&2; \
	    echo "Name another Python: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; \
	fi; \
	printf '==> Making %s with %s (%s)\n' "$(VENV)" "$$python" "$$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV) || { rm -rf $(VENV); \
	    echo "This Python has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# Constraints from the lock. If .venv was made with --system-site-packages (over a module, an image or an environment),
# the constraints omit PyTorch, so that the existing PyTorch stays if pyproject.toml allows its version.
LOCK := $(VENV)/constraints.txt
$(LOCK): requirements.lock | $(VENV)/bin/python
	@left='^$$'; ! grep -Eqi '^include-system-site-packages *= *true' $(VENV)/pyvenv.cfg || left='^(torch|triton)=='; \
	sed -E "/$$left/d" requirements.lock >$@

# The installer is uv if installed, because uv is faster, and otherwise pip. pip is also the installer if its
# configuration has an index or links, which uv would ignore, or if .venv was made with --system-site-packages, because
# uv does not see these packages. `UV=` always selects pip.
UV ?= $(shell grep -qis '^include-system-site-packages *= *true' $(VENV)/pyvenv.cfg || \
    python3 -m pip config list 2>/dev/null | grep -E 'index-url|find-links' >/dev/null || command -v uv)
INSTALL = $(if $(UV),$(UV) pip install --compile-bytecode --python $(VENV)/bin/python,python -m pip install --disable-pip-version-check) \
    --constraint $(LOCK) --editable
# On a terminal, the installer's output is one changing line. If the installer fails, its last lines are printed.
quietly = 2>&1 | tee $(VENV)/install.log | if [ -t 1 ]; then \
    while IFS= read -r line; do printf '\r\033[K%.78s' "$$line"; done; printf '\r\033[K'; else cat >/dev/null; fi || { tail -n 20 $(VENV)/install.log >&2; exit 1; }

# Each stamp file is renewed only if one of its sources has changed.
$(VENV)/.installed: pyproject.toml $(LOCK)
	$(say) 'Installing dlscale with $(if $(UV),uv,pip): PyTorch and some ninety packages, $(if $(UV),half a minute,a minute or two)'
	@$(INSTALL) . $(quietly)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(LOCK)
	$(say) 'Installing dlscale and the development tools with $(if $(UV),uv,pip)'
	@$(INSTALL) '.[dev]' $(quietly)
	@touch $(VENV)/.installed $@

.PHONY: install install-dev
install: $(VENV)/.installed  ## make the environment
install-dev: $(VENV)/.installed-dev  ## make the environment with the development tools

$(VENV)/.installed-docs: pyproject.toml $(LOCK) $(VENV)/.installed
	$(say) 'Installing the tools of the documentation'
	@$(INSTALL) '.[docs]' $(quietly)
	@touch $@

# ---- use -----------------------------------------------------------------------------------------

DEMO := dlscale run --profile local $(ARGS)

.PHONY: taste
taste: $(VENV)/.installed  ## run the ladder of one study and write its report, in a minute
	@dlscale run --profile local mnist_demo $(ARGS)

.PHONY: demo
ifeq ($(ENGINE),)
demo: $(VENV)/.installed  ## run the complete workflow at demo scale; the last lines name the report
	$(say) 'Running the workflow (config.yaml)'
	@$(DEMO)
else
# Rootless podman maps user IDs; keep-id keeps the caller's ID. The demo needs no network. The checkout is not
# relabelled for SELinux. --init forwards signals; the trap ends a container that is still running.
demo:
	@command -v $(ENGINE) >/dev/null || { echo "$(ENGINE) is not installed; install it, or run the demo without ENGINE=…" >&2; exit 1; }
ifeq ($(IMAGE),)
	$(say) 'Building localhost/dlscale:cpu (PyTorch is large: minutes on a first run)'
	@$(ENGINE) build $(if $(filter podman,$(ENGINE)),--format=docker) \
	    $(addprefix --build-arg=REVISION=,$(shell git rev-parse HEAD 2>/dev/null)) $(BUILD_ARGS) \
	    --target cpu --file docker/Dockerfile --tag localhost/dlscale:cpu .
endif
	$(say) 'Running the workflow (config.yaml) with $(ENGINE)'
	@name=dlscale-demo-$$$$; terminal=(); keep=(); \
	[ ! -t 0 ] || terminal=(--interactive --tty); \
	[ "$(ENGINE)" != podman ] || [ "$$(id -u)" -eq 0 ] || keep=(--userns=keep-id); \
	trap '$(ENGINE) kill "$$name" >/dev/null 2>&1 || true' EXIT; \
	$(ENGINE) run --rm --init --name "$$name" "$${terminal[@]}" "$${keep[@]}" --user "$$(id -u):$$(id -g)" \
	    --network none --cap-drop=ALL --security-opt=no-new-privileges --security-opt label=disable --no-healthcheck \
	    --volume "$(CURDIR):/dlscale" \
	    $(or $(IMAGE),localhost/dlscale:cpu) $(DEMO)
	$(say) '/dlscale in the container is $(CURDIR)'
endif

# Chromium runs without its sandbox, because root in a container may not create a sandbox. The page is trusted.
.PHONY: example
example: $(VENV)/.installed  ## renew the report in docs/examples and its picture (needs chromium and an idle machine)
	@snakemake --profile none --workflow-profile local -- plan_cosmo_demo
	@cp results/plans/cosmo_demo/report.html docs/examples/report.html
	@chromium --headless --no-sandbox --hide-scrollbars --window-size=1100,860 --virtual-time-budget=3000 \
	    --screenshot=docs/examples/report.png "file://$(CURDIR)/docs/examples/report.html"

.PHONY: bench
bench: $(VENV)/.installed-dev  ## measure dlscale itself: loaders, steps, rungs, preprocessing, DAG
	$(say) 'Running the benchmarks'
	@python bench/run.py $(ARGS)

.PHONY: bench-noise
bench-noise: $(VENV)/.installed-dev  ## test whether a report distinguishes noise from a slow-down of 5 %: twenty plans, half of them on a busy machine
	$(say) 'Measuring twenty plans, each with two equal runs and one that is 5 % slower'
	@python -m bench.noise $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(VENV)/.installed-dev  ## run the checks and benchmarks that need a GPU, eight minutes per call; see bench/gpu.py
	$(say) 'Running the checks and benchmarks of a GPU'
	@python bench/gpu.py --json $(VENV)/bench-gpu.json --markdown $(VENV)/bench-gpu.md $(ARGS)

# Packages that dlscale imports and that a machine with PyTorch may lack. Their wheels are few and small: a user copies
# them to that machine for --wheels.
GPU_PYTHON ?= 3.12
GPU_WHEELS := nvtx safetensors pydantic pydantic-core annotated-types typing-inspection typing-extensions pyyaml h5py psutil nvidia-ml-py \
    scipy pandas python-dateutil six line-profiler
.PHONY: bench-gpu-wheels
bench-gpu-wheels: $(VENV)/bin/python  ## collect wheels for bench-gpu on a machine without a network (GPU_PYTHON=3.12)
	$(say) 'Collecting wheels for Python $(GPU_PYTHON) on Linux x86-64 into $(VENV)/bench-gpu-wheels'
	@rm -rf $(VENV)/bench-gpu-wheels
	@grep -E "^($$(echo $(GPU_WHEELS) | tr ' ' '|'))==" requirements.lock | sed 's/ *#.*//' >$(VENV)/bench-gpu-wheels.txt
	@python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
	    --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	    --platform manylinux2014_x86_64 --dest $(VENV)/bench-gpu-wheels --requirement $(VENV)/bench-gpu-wheels.txt
	$(say) 'On that machine: python3 bench/gpu.py --json FILE --wheels FOLDER'

# ---- development ---------------------------------------------------------------------------------

# Tests run in parallel, each on one core. Options in ARGS override the options below: -n 0, -m slow.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores : 8)))
PYTEST := pytest --numprocesses=$(WORKERS) --dist=loadgroup

.PHONY: test
test: $(VENV)/.installed-dev  ## test every feature once: 25 minutes on two cores
	$(say) 'Running the tests (all of them: make test-all)'
	@$(PYTEST) -m 'not (slow or long or parallel or cluster or container)' $(ARGS)

SINCE ?= HEAD
.PHONY: test-fast
test-fast: $(VENV)/.installed-dev  ## run only the tests that import files changed since SINCE (default: HEAD)
	@different=$$(git diff --name-only $(SINCE) -- && git ls-files --others --exclude-standard) || exit 2; \
	[ -n "$$different" ] || { echo "Nothing differs from $(SINCE): no test to run"; exit 0; }; \
	echo '==> Running the tests that import a changed file'; \
	$(PYTEST) --changed=$(SINCE) -m 'not (slow or long or parallel or cluster or container)' $(ARGS) || [ $$? -eq 5 ] # 5: no test selected

.PHONY: test-all
test-all: $(VENV)/.installed-dev  ## run all tests that this machine can run
	$(say) 'Running all tests'
	@$(PYTEST) $(ARGS)

.PHONY: test-long
test-long: $(VENV)/.installed-dev  ## run the tests that take minutes each: guides, new studies, the notebook, small benchmarks, full trainings
	$(say) 'Running the long tests'
	@$(PYTEST) -m long $(ARGS)

.PHONY: test-fuzz
test-fuzz: $(VENV)/.installed-dev  ## damage small files of every reader, and settings: each case must succeed or end in a message; 25 cases each, ARGS="--count 10000" for more
	@python -m tests.fuzz $(ARGS)

.PHONY: test-code-mutations
test-code-mutations: $(VENV)/.installed-dev  ## make a hundred known mistakes in the code, one at a time: a test must fail for each
	@python -m tests.mutate_code $(ARGS)

.PHONY: test-faults
test-faults: $(VENV)/.installed-dev  ## kill, damage and disturb calls at random, then repeat them: eight trials; ARGS="--count 500" for more
	@python -m tests.faults $(ARGS)

.PHONY: test-parallel
test-parallel: $(VENV)/.installed-dev  ## compare every strategy with one process: on four and eight processes, and compiled
	$(say) 'Testing strategies and meshes of up to eight processes'
	@pytest -m parallel $(ARGS)

.PHONY: test-container
test-container: $(VENV)/.installed-dev  ## build the image with podman (installed if missing), and test it
	$(say) 'Testing the image (the first build takes minutes)'
	@DLSCALE_CONTAINER_TESTS=1 DLSCALE_NSYS_TESTS=1 pytest tests/container -m container $(ARGS)

.PHONY: test-cluster
test-cluster: $(VENV)/.installed-dev  ## start a Slurm cluster here (installed if missing), and test the workflow on it
	$(say) 'Testing on a Slurm cluster (half an hour, most of it waiting)'
	@DLSCALE_CLUSTER_TESTS=1 DLSCALE_CONTAINER_TESTS=1 $(PYTEST) tests/cluster -m cluster $(ARGS)

.PHONY: lint
lint: $(VENV)/.installed-dev  ## check style, types, layers, the workflow, the image's and CI's files
	$(say) 'ruff'
	@ruff check .
	@ruff format --check .
	$(say) 'English of comments, docstrings and messages'
	@python .ci/prose.py
	$(say) 'mypy'
	@env -u PYTHONPATH mypy  # mypy takes modules in PYTHONPATH for libraries, and hides their errors
	$(say) 'import-linter'
	@lint-imports
	$(say) 'snakefmt'
	@snakefmt --check Snakefile rules workflow_scripts/dlscale/extensions/*/*.smk
	$(say) 'snakemake --lint'
	@snakemake --workflow-profile none --lint
	$(say) 'hadolint, shellcheck'
	@hadolint docker/Dockerfile
	@shellcheck .ci/run tests/container/engine.sh tests/workflow/tour.sh
	$(say) 'actionlint'
	@if command -v actionlint >/dev/null; then actionlint; else echo 'not installed: only CI runs it'; fi

.PHONY: format
format: $(VENV)/.installed-dev  ## correct the style
	@ruff check --fix .
	@ruff format .
	@snakefmt Snakefile rules workflow_scripts/dlscale/extensions/*/*.smk

.PHONY: docs
docs: $(VENV)/.installed-docs  ## build the documentation as a site, in .venv/site; a broken link or anchor is an error
	$(say) 'Building the site'
	@NO_MKDOCS_2_WARNING=1 mkdocs build --site-dir $(VENV)/site
	$(say) 'Open $(VENV)/site/index.html; with search: python -m http.server --directory $(VENV)/site'

.PHONY: schema
schema: $(VENV)/.installed  ## write the JSON schema of config.yaml, for editors, and the reference of its keys
	@python -P -m dlscale schema >$(VENV)/schema.json
	@mv $(VENV)/schema.json workflow_scripts/dlscale/config/config.schema.json
	@python -P -m dlscale schema --markdown >$(VENV)/configuration.md
	@mv $(VENV)/configuration.md docs/configuration.md

.PHONY: lock
lock: | $(VENV)/bin/python  ## update requirements.lock and the images' locks from pyproject.toml; ARGS=--upgrade: newest versions
	$(say) 'Resolving the dependencies'
	@[ -x $(BIN)/uv ] || python -m pip install --quiet --disable-pip-version-check uv
	@cp requirements.lock $(VENV)/lock.txt
	@uv pip compile --quiet --extra dev --extra docs --python-version 3.11 --no-header --annotation-style line \
	    --output-file $(VENV)/lock.txt $(ARGS) pyproject.toml
	@{ printf '%s\n' '# Written by `make lock` from pyproject.toml: the core, the tools of development and of the site, for Python 3.11.' \
	        '# Used as constraints (pip install -c), so that torch comes in whatever build the index offers:' \
	        '# no local version (+cpu, +cu130), and none of the CUDA packages that only some of its builds need.'; \
	   sed -E -e '/^(nvidia-(cu|nccl|nvjitlink|nvshmem|nvtx)|cuda-|pip==|#|$$)/d' -e 's/^(torch==[0-9.]+)\+[a-z0-9.]+/\1/' -e 's/ +# via/  # via/' \
	        $(VENV)/lock.txt; } > requirements.lock
	@uv pip compile --quiet --extra dali-cuda13 --extra grib --python-version 3.11 --no-header --annotation-style line \
	    --constraint requirements.lock --output-file $(VENV)/lock-cuda13.txt pyproject.toml
	@python docker/lock.py $(VENV)/lock-cuda13.txt

.PHONY: version
version: | $(VENV)/bin/python  ## write pyproject.toml's version into all other files that have it
	@python .ci/release.py version

TAG ?=
.PHONY: release-check
release-check: $(VENV)/.installed-dev  ## check a release here: wheel and sdist, version, changelog, and with TAG=v0.1.0 the tag
	$(say) 'Building the wheel and the source distribution into dist'
	@rm -rf dist
	@uv build --quiet --out-dir dist
	@uv tool run --quiet twine@7.0.0 check --strict dist/*
	@python .ci/release.py check $(addprefix --tag ,$(TAG))

.PHONY: clean
clean:  ## remove the environment and all caches; results/ stays
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@rm -rf workflow_scripts/*.egg-info
	@find workflow_scripts tests -type d -name __pycache__ -prune -exec rm -rf {} +
