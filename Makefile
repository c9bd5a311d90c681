# Needs python3 (3.10 or newer) and make. Everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Quiet about setuptools' advice for editable installs, which fits neither user nor developer.
PIP := PYTHONWARNINGS=ignore $(PY) -m pip --disable-pip-version-check
PYTEST_ARGS ?=
# Tests start hundreds of Pythons: without the files of bytecode each of them would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE
# Sessions of pytest beside each other: one more than there are cores, because tests of several processes wait for each other.
# With two more, two cores took 2 minutes longer: waiting processes have threads that wake.
PYTEST_SESSIONS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() + 1))')
PYTEST = $(PY) -m pytest --numprocesses $(PYTEST_SESSIONS) --dist worksteal $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo docs types-and-docs test test-fast test-full test-fuzz test-cluster test-oldest test-newest test-gpu test-npu test-mmengine test-openmmlab async-io npu-sources npu-device lint types unit pytest release-check \
	bench format clean distclean

help:
	@echo "make demo    train a digits classifier under every strategy this machine can run, and compare them"
	@echo "make test    lint, type check and the whole test suite"
	@echo "make test-fast  the tests that start no process, in about two minutes: for while you write"
	@echo "make test-full  the same with every combination of strategies and processes"
	@echo "make test-fuzz  2,000 random models under every strategy, beside a loop by hand (FUZZ='--runs 100 --seed 7')"
	@echo "make test-cluster  Slurm, MPI, torchrun and Ray, started on this machine; root installs what they need"
	@echo "make test-oldest  the suite with the oldest versions that pyproject.toml allows, on Python 3.10"
	@echo "make test-newest  the suite with the newest releases and pre-releases of torch, transformers, DeepSpeed and what else is used"
	@echo "make release-check  the wheel in clean environments, oldest and newest versions; minutes and 5 GB each"
	@echo "make test-gpu  what needs an accelerator, with a Python that has torch already (PYTHON=...)"
	@echo "make test-npu  the tests of meshes and of parity on a simulated accelerator, whose collectives are as strict as NCCL's"
	@echo "make test-mmengine  MMEngine's own tests, downloaded and translated, compared with what is expected"
	@echo "make test-openmmlab  configurations of mmpretrain, mmdetection and mmsegmentation, compared with MMEngine's runner"
	@echo "make lint    ruff only"
	@echo "make types   mypy only"
	@echo "make docs    the documentation site, into build/site; a wrong link is an error"
	@echo "make unit    pytest only (PYTEST_ARGS='-k name' to choose)"
	@echo "make bench   measure the loop's overhead beside other libraries'"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove build outputs and caches (make distclean: .venv and work_dirs too)"

demo: $(VENV)/.installed-examples
	$(PY) examples/demo.py

# Two at a time: a download beside the installation, mypy and the site on one core beside tests that sometimes wait.
test: $(VENV)/pyvenv.cfg
	@$(MAKE) --no-print-directory --jobs=2 lint npu-sources
	@$(MAKE) --no-print-directory --jobs=2 types-and-docs pytest

test-fast: PYTEST_ARGS += -m "not full and not processes and not slow"
test-fast: $(VENV)/.installed-dev
	$(PYTEST)

# An expression for the marker replaces that of pyproject.toml. The cluster tests stand apart: one session of pytest makes them.
test-full: PYTEST_ARGS += -m "not cluster"
test-full: lint types docs async-io unit
	$(MAKE) test-npu PYTEST_ARGS=
	$(MAKE) test-cluster PYTEST_ARGS=

FUZZ ?= --runs 2000
test-fuzz: $(VENV)/.installed-dev
	$(PY) -m tests.fuzz $(FUZZ)

# Real launchers on pretended machines. What cannot be installed or made here (packages, network namespaces) skips its tests.
CLUSTER_PACKAGES := slurmctld slurmd slurm-client openmpi-bin mpich iproute2
test-cluster: $(VENV)/.installed-dev
	@$(PIP) install --quiet --editable '.[ray]' || true
	@dpkg -s $(CLUSTER_PACKAGES) >/dev/null 2>&1 || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive && { \
		apt-get install -qq -y --no-install-recommends $(CLUSTER_PACKAGES) >/dev/null 2>&1 || { \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends $(CLUSTER_PACKAGES) >/dev/null; }; }; } || \
		echo "$(CLUSTER_PACKAGES) cannot all be installed here: their tests will be skipped" >&2
	$(PY) -m pytest -p no:xdist tests -m cluster --durations=0 --durations-min=1 $(PYTEST_ARGS)

# What DeepSpeed compiles its asynchronous input and output with. Where it cannot be had, the tests that need it are skipped
# and say what is missing.
async-io: $(VENV)/.installed-dev
	@$(PIP) install --quiet ninja || true
	@test -e /usr/include/libaio.h || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive && { \
		apt-get install -qq -y libaio-dev >/dev/null 2>&1 || { apt-get update -qq && apt-get install -qq -y libaio-dev >/dev/null; }; }; } || \
		echo "libaio-dev cannot be installed here: tests of state in files will be skipped" >&2

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# mypy does not follow the import hook of an editable install: it reads an installed copy.
types: $(VENV)/.installed-dev
	@rm -rf build/lib build/types
	@$(PIP) install --quiet --no-deps --no-build-isolation --target build/types .
	cd build/types && ../../$(PY) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p flextrain

types-and-docs: npu-device types
	@$(MAKE) --no-print-directory docs

# NO_MKDOCS_2_WARNING: a notice about other products, on every build. Not --quiet: what is not shown does not count for --strict.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

unit: npu-sources pytest

pytest: $(VENV)/.installed-dev
	$(PYTEST)

# torch_npu's sources (44 MB, once) for the tests of its optimizers, which are skipped where they cannot be had.
npu-sources: $(VENV)/pyvenv.cfg
	@$(PY) tests/npu/fetch_torch_npu.py || true

# Compiled while pytest collects; its sessions would all wait for it. They say what is missing where it cannot be compiled.
npu-device: $(VENV)/.installed-dev
	@$(PY) -c "from tests.npu.simulated import built; built()" >/dev/null 2>&1 || true

# MMEngine's own tests, downloaded and translated, with flextrain in MMEngine's place.
test-mmengine: $(VENV)/.installed-dev
	$(PY) tests/mmengine/upstream/run.py

# Configurations of mmpretrain, mmdetection and mmsegmentation, which are installed into build/openmmlab.
test-openmmlab: $(VENV)/.installed-dev
	$(PY) tests/mmengine/openmmlab/run.py $(OPENMMLAB)

# In a virtual environment of its own, which takes 6 GB.
OLDEST_PYTHON ?= python3.10
OLDEST := .venv-oldest
test-oldest: PY = $(OLDEST)/bin/python
test-oldest: $(OLDEST)/.installed
	$(PYTEST)

$(OLDEST)/.installed: pyproject.toml tests/oldest.txt
	@$(OLDEST_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null || { \
		echo "make test-oldest needs Python 3.10, and $(OLDEST_PYTHON) is none: make test-oldest OLDEST_PYTHON=/path/to/python3.10" >&2; exit 1; }
	@test -e $(OLDEST)/pyvenv.cfg || $(OLDEST_PYTHON) -m venv $(OLDEST)
	@echo "Installing the oldest versions into $(OLDEST); the first time this downloads torch, which takes a while"
	@PYTHONWARNINGS=ignore $(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet --constraint tests/oldest.txt --editable '.[dev]'
	@touch $@

# Every time anew, because what is newest changes. TRIED in core/version.py takes what has passed.
NEWEST := .venv-newest
test-newest: PY = $(NEWEST)/bin/python
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	@PYTHONWARNINGS=ignore $(PY) -m pip --disable-pip-version-check install --quiet --pre --upgrade --editable '.[dev]'
	@$(PY) -m pip list 2>/dev/null | grep -iE '^(torch|deepspeed|transformers) '
	$(PYTEST)

# The wheel in clean environments of several versions of Python, as a reader installs it; minutes and 5 GB each, one after the other.
RELEASE_PYTHONS ?= python3.10 python3.13
release-check: $(VENV)/.installed-dev
	@for each in $(RELEASE_PYTHONS); do echo "== $$each"; $(PY) tests/release/check.py --python $$each || exit 1; done
	@echo "== $(OLDEST_PYTHON), the oldest versions"; $(PY) tests/release/check.py --python $(OLDEST_PYTHON) --oldest

# Installs nothing: the package is found by its path. FLEXTRAIN_TEST_DEVICE=cpu tries the tests themselves.
test-gpu:
	$(PYTHON) tests/gpu/run.py $(PYTEST_ARGS)

# What make test has of them on the CPU.
test-npu: $(VENV)/.installed-dev
	FLEXTRAIN_TEST_DEVICE=npu $(PYTEST) tests/mesh tests/parity -m "processes and not full"

# Measures on the machine at hand, and puts the result into benchmarks/results/ and docs/benchmarks.md.
bench: $(VENV)/.installed-bench
	$(PY) benchmarks/loop_overhead.py --docs

format: $(VENV)/.installed-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# A stamp per set of extras: installed again only when pyproject.toml is newer. uv downloads and unpacks side by side, in a quarter
# of pip's time; pip does it where uv cannot be had, or knows less than pip's own configuration. What most tests import is
# compiled by all cores, without the packages' own tests and the like, the rest when it is imported. The status of compiling
# is not looked at: some packages have files that are no Python of this version, and not all extras have all packages.
COMPILED := torch torchvision deepspeed mmengine networkx numpy pandas peft scipy sklearn sympy torchmetrics
EDITABLE = --constraint tests/tried.txt --editable '.[$*]'
$(VENV)/.installed-%: pyproject.toml tests/tried.txt | $(VENV)/pyvenv.cfg
	@echo "Installing flextrain[$*] into $(VENV); the first time this downloads torch, which takes a while"
	@{ $(PIP) install --quiet uv && $(VENV)/bin/uv pip install --quiet --python $(PY) $(EDITABLE); } 2>/dev/null || $(PIP) install --quiet --no-compile $(EDITABLE)
	@cd $(VENV)/lib/python3*/site-packages && $(abspath $(PY)) -m compileall -qq -j 0 -x '/(tests?|_vendor|onnx)/' $(COMPILED) || true
	@# Its grammar goes to a cache that it does not write in one piece: sessions of pytest beside each other would read half of it.
	@case $* in dev) $(PY) -c 'import yapf' 2>/dev/null || true;; esac
	@touch $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "flextrain needs Python 3.10 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(OLDEST) work_dirs
