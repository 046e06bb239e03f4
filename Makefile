# The tasks of a checkout. They need Python 3.11, make and git; `make env` and `make system` install the rest.

PYTHON := .venv/bin/python
RUN := .venv/bin/capflow run --model demo --prompts examples/prompts.jsonl --engine-arg enforce_eager=true \
	--consumer filesystem:root=demo-data/rows,on_collision=overwrite \
	--consumer duckdb:path=demo-data/capflow.duckdb,probes=examples/code.safetensors \
	--consumer dashboard:probes=examples/code.safetensors
# In a terminal the dashboard stays until Ctrl-C.
STAY := $(shell test -t 2 && echo --stay)

.DEFAULT_GOAL := help
export NO_MKDOCS_2_WARNING := 1
.PHONY: help demo check check-types check-waiting check-others test-one test lane-engines lane-waiting lane-browser-rows lane-others proof proof-engines proof-others notebooks simulate simulate-fleet fuzz chaos soak soak-engine soak-requests architectures matrix lint format bench versus docs docs-serve metrics proto env system compiler page-tools lock sbom audit clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

demo: env compiler  ## run a real model over examples/prompts.jsonl, with files, DuckDB and the dashboard
	@rm -rf demo-data && mkdir -p demo-data
	$(RUN) $(STAY)

check: env  ## lint, check types and run the quick tests; five minutes
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(MAKE) --no-print-directory --jobs --keep-going --output-sync=target check-types check-waiting check-others

check-types:
	@$(PYTHON) -m mypy

check-waiting:
	@$(PYTHON) $(QUICK) $(WAITING)

check-others:
	@$(PYTHON) $(QUICK) $(WAITING:%=--ignore=%)

test-one: env  ## run one test file or test: make test-one T=tests/capture/test_spec.py
	@[ -n "$(T)" ] || { echo "make test-one: no T given; expected a test, such as T=tests/capture/test_spec.py" >&2; exit 2; }
	$(PYTHON) -m pytest $(T)

# The lanes of `make test` run side by side, each with its output at its end. These tests wait for time to pass rather
# than for the processor, most of them, as those of the browser do, so they fill what the engines leave. The lanes take
# about as long as each other.
WAITING := tests/hub tests/consumers tests/transport
FIRST_ROWS := $(sort $(wildcard tests/rows/test_[a-c]*.py))
LANES := lane-engines lane-waiting lane-browser-rows lane-others
LANE := -m pytest --durations 25 -m
PROOFS := proof-engines proof-others
QUICK := -m pytest -q -m "not (engine or browser or long or slow)" --durations 5 --durations-min 2
test: env system page-tools  ## run the tests except the long ones: those of engines, of the browser, those that wait and the rest side by side
	@# Hundreds of tests start a process, which would compile these files again where it may write no bytecode.
	@$(PYTHON) -m compileall -q capflow consumers dashboard engine_ext tests
	@rm -rf build/tests
	@$(MAKE) --no-print-directory --jobs --keep-going --output-sync=target $(LANES) || { \
		echo "make test: what failed, of all lanes; their whole output is in build/tests"; \
		grep -hE -A 100 "Fatal Python error|^(FAILED|ERROR) " build/tests/*.txt; exit 2; }

$(LANES) $(PROOFS): SHELL := bash -o pipefail
$(LANES) $(PROOFS): | build/tests
build/tests:
	@mkdir -p $@

lane-engines:
	@{ $(PYTHON) $(LANE) "engine and not long" --ignore=tests/rows; engines=$$?; \
		$(PYTHON) $(LANE) "not (engine or browser or long)" tests/engine && exit $$engines; } 2>&1 | tee build/tests/$@.txt

lane-waiting:
	@{ $(PYTHON) $(LANE) "not (engine or long)" $(WAITING); waiting=$$?; \
		$(PYTHON) $(LANE) "engine and not long" $(FIRST_ROWS) && exit $$waiting; } 2>&1 | tee build/tests/$@.txt

# The browser needs no engine and is done early, so the engines of tests/rows come after it.
lane-browser-rows:
	@{ $(PYTHON) $(LANE) "browser and not (engine or long)" $(WAITING:%=--ignore=%); browser=$$?; \
		$(PYTHON) $(LANE) "engine and not long" tests/rows $(FIRST_ROWS:%=--ignore=%) && exit $$browser; } 2>&1 | \
		tee build/tests/$@.txt

lane-others:
	@$(PYTHON) $(LANE) "not (browser or engine or long)" $(WAITING:%=--ignore=%) --ignore=tests/engine 2>&1 | \
		tee build/tests/$@.txt

proof: env system  ## run the long tests, in two lanes; an hour and a half
	@# pip accepts no file in which only some packages have hashes. Each of the packages below is for a few tests.
	@sed 's/ --hash=.*//' requirements/cpu.lock > .venv/constraints.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint .venv/constraints.txt "ray[serve]>=2.40" "sae-lens>=6" \
		"kubernetes-validate>=1.31"
	@rm -rf build/tests
	@$(MAKE) --no-print-directory --jobs --keep-going --output-sync=target $(PROOFS)

proof-engines:
	@$(PYTHON) $(LANE) long tests/rows tests/engine 2>&1 | tee build/tests/$@.txt

proof-others:
	@$(PYTHON) $(LANE) long --ignore=tests/rows --ignore=tests/engine 2>&1 | tee build/tests/$@.txt

notebooks: env system  ## run the notebooks of examples/ on the demo model
	$(PYTHON) -m tests.kit.notebooks examples/*.ipynb

simulate-fleet: env  ## run 1,000 workers and 8 hubs, of which one dies, and say what one hub can take; ten minutes
	$(PYTHON) -m tests.fleet

simulate: env  ## run 10,000 seeds of the simulated hub, workers, disks and connections; half an hour
	$(PYTHON) -m tests.simulation --seeds 10000

fuzz: env  ## give nearly valid input to every reader of messages and files; an hour
	$(PYTHON) -m tests.fuzz --seconds 3600

# 80 kills and 10 full disks; then a kill at each named point, 20 times.
chaos: env  ## kill hub and engine under load, fill the disk, and check every row; half an hour
	$(PYTHON) -m tests.chaos
	$(PYTHON) -m pytest -m long tests/buffers/test_spool_crash.py tests/hub/test_hub_crash.py tests/consumers/filesystem/test_files_crash.py

soak: env  ## send frames beside hostile peers; memory, descriptors and threads must not grow; an hour
	$(PYTHON) -m tests.soak

soak-engine: env compiler  ## send requests to a real engine; memory, descriptors and threads must not grow; an hour
	$(PYTHON) -m tests.soak.engine

soak-requests: env  ## compare 5,000 random requests with the reference; a quarter of an hour
	CAPFLOW_ORACLE_REQUESTS=5000 $(PYTHON) -m pytest -s tests/rows/test_oracle.py

architectures: env  ## compare every architecture with Transformers and write docs/compatibility.md; 45 minutes
	$(PYTHON) -m tests.architectures --write

matrix: env system  ## prove versions of vLLM and write docs/compatibility.md: make matrix V="0.33.0" C="rows,HTTP"
	$(PYTHON) -m tests.matrix $(if $(C),--only "$(C)") $(V)

lint: env page-tools  ## run ruff and mypy, and Biome and tsc for the dashboard's page
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@cd dashboard && npm run --silent lint && npm run --silent types

format: env page-tools  ## let ruff and Biome rewrite what they can
	@$(PYTHON) -m ruff check --fix-only .
	@$(PYTHON) -m ruff format .
	@cd dashboard && npm run --silent format

bench: env compiler  ## measure the cost of capflow against vLLM without it
	$(PYTHON) benchmarks/overhead.py

versus: env compiler  ## compare capflow with its peers and write the tables into docs/performance.md; over half an hour
	$(PYTHON) benchmarks/versus.py --write
	$(PYTHON) benchmarks/versus.py --write --model llama --only disk,memory,extract

docs: env  ## build the documentation site into site/
	$(PYTHON) -m mkdocs build --strict

docs-serve: env  ## serve the documentation site at http://127.0.0.1:8000 and rebuild it after each change
	$(PYTHON) -m mkdocs serve

metrics: env  ## renew the table of metrics in docs/operations.md
	$(PYTHON) -m capflow.hub.monitor.metrics docs/operations.md

proto: env  ## generate the Python code of the gRPC schema
	cd engine_ext && ../$(PYTHON) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		capflow_engine/serve/rpc/capflow.proto

env:  ## make .venv from requirements/cpu.lock; does nothing if it is up to date
	@bash requirements/env.sh

system:  ## install what pip cannot: a C++ compiler, Python's headers, Chromium, node
	@bash requirements/system.sh compiler chromium node

compiler:
	@bash requirements/system.sh compiler

page-tools: dashboard/node_modules/.package-lock.json  ## install what checks the dashboard's page, from npm

dashboard/node_modules/.package-lock.json: dashboard/package-lock.json
	@bash requirements/system.sh node
	@cd dashboard && npm ci --ignore-scripts --no-audit --no-fund --silent
	@touch $@

lock: env  ## renew requirements/*.lock from pyproject.toml and requirements/cpu.in
	$(PYTHON) requirements/lock.py

sbom: env  ## write a CycloneDX bill of materials of each lock to dist/
	@bash requirements/tools.sh sbom

audit: env  ## look up known vulnerabilities of every locked package; needs the network
	@bash requirements/tools.sh audit

clean:  ## remove everything built and captured, and .venv; the model cache stays
	rm -rf .venv .tools dashboard/node_modules demo-data build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
