# make setup   build .venv and .venv-engine (needs python3.11 and nothing else; minutes, once)
# make run     setup, then the whole system learns on this machine
# make test    setup, then every test
# make check   style, types, wire contract
# make k8s-check      render and judge deploy/k8s (ARGS=--mutate: show that mistakes are noticed); needs kubectl
# make network-check  the whole stack in network namespaces behind the NetworkPolicies, each edge taken away (Linux, root)
# make compose-check  judge docker-compose.yml and the Dockerfiles
# make images-check   build the CPU images, run overlay cpu from them in containers (docs/kubernetes.md); root, buildah, podman, kubectl
# make chaos ROUNDS=100   kill, stop, cut off and damage what runs, then account for every trajectory (docs/chaos.md)
# make alerts-check   promtool over alert rules and their tests, then a real Prometheus over a real run (needs Debian's prometheus)
# make prove-algorithms | prove-learning | prove-streaming | prove-preference | prove-engines | prove-stability | prove-fuzz | prove-soak | prove-transitions | prove-weights | prove-online | prove-judge | prove-preferences-api | prove-feedback   the README's claims (minutes a seed)
PYTHON ?= python3.11
PRESET ?= tiny
ARGS ?=
ROUNDS ?= 100
BIN := .venv/bin
CODE := sao services tests engine/sglang_cpuref tools bench deploy
export OMP_NUM_THREADS := 1

PROOFS := prove-algorithms prove-learning prove-streaming prove-preference prove-engines prove-stability prove-fuzz prove-soak prove-transitions prove-weights prove-online prove-judge prove-put prove-feedback

.PHONY: $(PROOFS) prove-preferences-api help setup run test browser alerts-check k8s-check network-check compose-check images-check chaos check format proto locks clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup:
	@command -v $(PYTHON) >/dev/null || { echo "python3.11 is needed; name it with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) tools/setup.py

run: setup
	@$(BIN)/sao up --preset $(PRESET) $(ARGS)

test: setup browser
	$(BIN)/pytest $(ARGS)

# The console's tests drive a real Chromium; without one they are skipped, and say so.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		{ apt-get install -qy --no-install-recommends chromium >/dev/null 2>&1 || \
		{ apt-get -q update && apt-get install -qy --no-install-recommends chromium; }; }; } || \
		echo "no Chromium: the console's tests will be skipped; on Debian: sudo apt-get install chromium" >&2

$(PROOFS): setup
	$(BIN)/python -m bench.prove $(@:prove-%=%) $(ARGS)

prove-preferences-api: prove-put

# checkov's pins would clash with the project's, so what judges manifests has an environment of its own.
.venv-deploy/stamp: requirements/deploy.lock
	@echo "building .venv-deploy (a minute, once)"
	@$(PYTHON) -m venv --clear .venv-deploy
	@.venv-deploy/bin/pip install --quiet --no-deps --disable-pip-version-check -r requirements/deploy.lock
	@touch $@

k8s-check: setup .venv-deploy/stamp
	@.venv-deploy/bin/python -m tools.k8s_check $(ARGS)

network-check: setup
	@$(BIN)/python -m tools.network_check $(ARGS)

compose-check: .venv-deploy/stamp
	@.venv-deploy/bin/python -m tools.compose_check $(ARGS)

images-check: setup
	@$(BIN)/python -m tools.images_check $(ARGS)

chaos: setup
	@$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(ARGS)

alerts-check: setup
	@$(BIN)/python -m bench.alerts

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(wildcard $(CODE))
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python tools/locks.py --check
	$(PYTHON) tools/proto.py --check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

proto:
	$(PYTHON) tools/proto.py

locks: setup
	$(BIN)/python tools/locks.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
