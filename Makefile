# `make run` and `make test` do all the set-up themselves: they need Python >= 3.11 and this file.

VENV := .venv
BIN := $(VENV)/bin
QUICKSTART := runs/quickstart
FEDERATION := runs/federation-demo
# Under make -j the steps would share two cores and mix what they print.
.NOTPARALLEL:
.PHONY: help install run federation-demo test lint format check unit federations jax notebooks \
	wheel-check processors same docs docs-serve house clean

help:
	@echo "make install      everything, for the tests, the pages and the studies"
	@echo "make run          train on the built-in digits, compare four methods and write a page (a minute)"
	@echo "make federation-demo  a server and three clients as processes, one killed on the way"
	@echo "make test         style, types, the built wheel and all tests"
	@echo "make lint         style, types and the order of imports"
	@echo "make check        tests only; make check ARGS='-k coreset' picks some"
	@echo "make unit, federations, jax, notebooks    the parts of make check, one after the other"
	@echo "make processors   numerical tests again, with the arithmetic of three other processors"
	@echo "make same AS=COMMIT   does this tree give the numbers of that commit, to the bit?"
	@echo "make format       put the code into shape"
	@echo "make wheel-check  build the wheel and run it from outside the source tree"
	@echo "make docs         build the documentation into site/; make docs-serve shows it"
	@echo "make house        count files, imports, calls and settings, into docs/architecture.md"
	@echo "make clean        remove the environment, caches and the quickstart's results"

# --- The environment -----------------------------------------------------------------------------

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some machines forbid Python to keep what it compiled. Then every process compiles PyTorch anew:
# 8 s instead of 3, and the tests start hundreds of them.
export PYTHONDONTWRITEBYTECODE :=

install: $(VENV)/.installed

$(VENV)/.created:
	@python=; \
	for candidate in python3.11 python3; do \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			python=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "corefed needs Python 3.11 or newer; neither python3.11 nor python3 here is one" \
			"($$(python3 --version 2>&1)). Install it and type make again." >&2; \
		exit 1; \
	fi; \
	echo "==> creating $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV) || { \
		echo "$$python could not create an environment; on Debian and Ubuntu its venv module is" \
			"a package of its own (python3.11-venv)." >&2; \
		exit 1; \
	}
	@touch $@

# What a first look needs. The rest, for the tests, the pages and the studies, is `make install`.
$(VENV)/.first-look: pyproject.toml constraints.txt $(VENV)/.created
	@echo "==> installing corefed and what it needs into $(VENV) (once; PyTorch is large)"
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[report,flower]'
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.created
	@echo "==> installing corefed and its dependencies into $(VENV) (once; PyTorch is large)"
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[dev,vision,flower,report,web,tables,onnx,mlflow,tensorboard,numpyro,blackjax,pymc,docs]'
	@touch $@ $(VENV)/.first-look

# --- A first look --------------------------------------------------------------------------------

# Four ways to train the same ten clients, three seeds each. The random subset is redrawn as often
# as the coresets are reselected, so that only the choice of points differs.
METHODS := independent pfedbayes coreset-pfedbayes random-subset
TRAIN := $(BIN)/corefed run --data digits --clients 10 --rounds 40 --seed 0,1,2
run: $(VENV)/.first-look
	@rm -rf $(QUICKSTART)
	@echo "==> 1/4 independent: ten clients, each alone"
	$(TRAIN) --method independent --out $(QUICKSTART)/independent
	@echo "==> 2/4 pfedbayes: the same clients, federated, on all their data"
	$(TRAIN) --method pfedbayes --out $(QUICKSTART)/pfedbayes
	@echo "==> 3/4 coreset-pfedbayes: each on a weighted fifth of its data"
	$(TRAIN) --method coreset-pfedbayes --fraction 0.2 --out $(QUICKSTART)/coreset-pfedbayes
	@echo "==> 4/4 random-subset: each on a random fifth, redrawn as often"
	$(TRAIN) --method random-subset --fraction 0.2 --set redraw_every=20 \
		--out $(QUICKSTART)/random-subset
	@echo "==> as a page"
	$(BIN)/corefed report $(METHODS:%=$(QUICKSTART)/%) --baseline $(QUICKSTART)/pfedbayes \
		--out $(QUICKSTART)/report.html
	@echo "==> side by side, and what the table shows"
	$(BIN)/corefed compare $(METHODS:%=$(QUICKSTART)/%)

# A real federation: a server and three clients as processes of this machine, one of them killed.
federation-demo: $(VENV)/.first-look
	@rm -rf $(FEDERATION)
	OMP_NUM_THREADS=1 $(BIN)/corefed federation demo --out $(FEDERATION)

# --- What must hold ------------------------------------------------------------------------------

# Federations mostly wait: for processes to start, and for each other. The unit tests fill that time,
# at a lower priority, so that nothing that waits for a clock waits for them.
SIDE_BY_SIDE := $(BIN)/python tests/support/side_by_side.py
UNIT := nice -n 5 $(MAKE) --no-print-directory unit
OTHERS := $(MAKE) --no-print-directory

test: install
	@$(SIDE_BY_SIDE) '$(UNIT)' '$(OTHERS) lint wheel-check federations jax notebooks'

# Tests only.
check: install
	@$(SIDE_BY_SIDE) '$(UNIT)' '$(OTHERS) federations jax notebooks'

lint: install
	@echo "==> style and types"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@echo "==> imports only go down"
	$(BIN)/lint-imports --no-logo --no-cache

# Data that lie beside the checkout are used unless COREFED_DATA names others.
ifeq ($(origin COREFED_DATA), undefined)
ifneq ($(wildcard ../shared/data/.),)
export COREFED_DATA := $(abspath ../shared/data)
endif
endif

# Two processes with the threads that users have, which sleep while they wait. Exit code 5 of pytest is
# that ARGS picked none of these. `tests/conftest.py` says where marked tests lie.
PYTEST = OMP_NUM_THREADS=$(or $(THREADS),2) OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 2
unit: install
	@echo "==> tests (data: $${COREFED_DATA:-only what is built in})"
	$(PYTEST) --dist worksteal -m 'not federation and not jax' $(ARGS) || [ $$? -eq 5 ]

# Two files at a time: those of a file share one federation. Its six processes, which have a machine
# each elsewhere, share these cores: one thread each.
federations: THREADS := 1
federations: install
	@echo "==> tests of real federations: processes that are killed, frozen and made to lie"
	$(PYTEST) --dist loadfile -m federation $(ARGS) || [ $$? -eq 5 ]

jax: install
	@echo "==> tests that import JAX"
	$(PYTEST) -m jax $(ARGS) || [ $$? -eq 5 ]

notebooks: install
	@echo "==> notebooks"
	$(PYTEST) --nbmake --nbmake-timeout=300 examples/notebooks $(ARGS) || [ $$? -eq 5 ]

# Numerical tests with the arithmetic of other processors: of Intel's with AVX2 and with SSE4.2, and
# of MKL's kernels that all have. On a machine with a lesser processor these change little.
PROCESSORS := 'MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2' \
	'MKL_ENABLE_INSTRUCTIONS=SSE4_2 ATEN_CPU_CAPABILITY=default' MKL_CBWR=COMPATIBLE
NUMERICAL := $(addprefix tests/,selectors coreset bayes golden/test_golden.py models training)
processors: install
	@for processor in $(PROCESSORS); do \
		echo "==> numerical tests with $$processor"; \
		env $$processor $(PYTEST) --dist worksteal -m 'not federation and not jax' $(NUMERICAL) \
			$(ARGS) || exit 1; \
	done

# The golden cases by the package of a commit and by this tree's, on this machine. `AS` is also
# make's own name of an assembler, hence its origin.
same: install
ifneq ($(filter default undefined,$(origin AS)),)
	@echo "Name a commit to compare with: make same AS=HEAD; CASES=methods/ picks cases by a part of" \
		"their name, THREADS=2 runs them on two threads." >&2; exit 2
else
	@$(BIN)/python tests/golden/same.py '$(AS)' --cases '$(CASES)' --threads $(or $(THREADS),1)
endif

# The wheel is made from the source archive, and installed into a folder of its own that comes
# before the source tree on the path. It trains and compares there.
wheel-check: install
	@echo "==> the source archive and the wheel, outside the source tree"
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	python="$(CURDIR)/$(BIN)/python" && \
	"$$python" -m hatchling build -t sdist -d "$$folder/sdist" >/dev/null && \
	"$$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$$folder" \
		"$$folder"/sdist/*.tar.gz && \
	"$$python" -m pip install --quiet --no-deps --no-compile --target "$$folder/site" "$$folder"/*.whl && \
	cd "$$folder" && export PYTHONPATH="$$folder/site" && \
	"$$python" -c 'import corefed, os; assert corefed.__file__.startswith(os.environ["PYTHONPATH"])' && \
	"$$python" -m corefed --version && \
	"$$folder/site/bin/corefed" methods && \
	"$$python" -m corefed run --rounds 2 --quiet --out run && \
	"$$python" -m corefed compare run && \
	test ! -e "$$folder/site/corefed_studies"

# --- The documentation ---------------------------------------------------------------------------

# Material for MkDocs prints a page about its successor otherwise.
export NO_MKDOCS_2_WARNING := 1

docs: install
	@echo "==> the documentation, into site/"
	$(BIN)/mkdocs build --quiet

docs-serve: install
	$(BIN)/mkdocs serve --no-strict

# The table and the picture of docs/architecture.md.
house: install
	OMP_NUM_THREADS=1 $(BIN)/python -m corefed_studies.house --page docs/architecture.md

# --- Housekeeping --------------------------------------------------------------------------------

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(QUICKSTART) $(FEDERATION) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
