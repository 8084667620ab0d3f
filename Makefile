# Guess a target; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup packages lint test soak fuzz matrix sanity pictures docs demo tutorial bench controlplane conformance record-goldens release clean

VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export ANSIBLE_NOCOWS := 1

# A pyenv shim may shadow a name without having the version behind it, so each candidate is tried.
find_python = for p in python3.11 python3.12 python3.13 python3 /usr/bin/python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; exit 0; }; \
	done; echo 'Python 3.11 or newer with venv is needed' >&2; exit 1

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: packages $(VENV)/.installed  ## system packages by apt, everything else into .venv
	@# Where Python may not write its caches, every start of akp would compile anew what has changed since.
	@$(BIN)/python -m compileall -q plugins/plugin_utils

packages:
	@.ci/packages

$(VENV)/.installed: requirements.txt requirements-ansible.txt requirements-dev.txt pyproject.toml | packages
	@[ -x $(BIN)/python ] || "$$($(find_python))" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@# Ansible looks for collections on Python's path: with this link playbooks find ours from anywhere. The package is a link
	@# on that path as well: the finder that pip writes would cost every start of akp 20 ms.
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	mkdir -p "$$site/ansible_collections/agentless" $(VENV)/checkout; \
	ln -sfn "$(CURDIR)" "$$site/ansible_collections/agentless/kube_proxy"; \
	ln -sfn "$(CURDIR)/plugins/plugin_utils" $(VENV)/checkout/agentless_kube_proxy; \
	rm -f "$$site"/__editable__*agentless_kube_proxy*; \
	echo "$(CURDIR)/$(VENV)/checkout" >"$$site/agentless_kube_proxy.pth"
	@touch $@
	@echo "ready: $(BIN)/akp, $(BIN)/ansible-playbook"

lint: setup  ## every linter; silence is good news
	@.ci/lint

# Many tests wait more than they compute. The slow files come first (tests/conftest.py). Tests of one file may build on another.
test: setup  ## unit tests, and packets through real kernels in the lab (root)
	@$(BIN)/pytest -q --numprocesses $$(($$(nproc) + 1)) --dist loadfile --no-loadscope-reorder -m 'not controlplane and not soak' $(ARGS)

soak: setup controlplane  ## minutes of faults, load and random input (root); AKP_WRITE_DOCS=1 writes the table of docs/reliability.md
	@$(BIN)/pytest -q --timeout 3600 -m soak $(ARGS)

fuzz: setup  ## everything that reads what others wrote, against random input; MINUTES=10
	@AKP_FUZZ_MINUTES=$(or $(MINUTES),10) $(BIN)/pytest -q -s -m soak tests/fuzz $(ARGS)

matrix: packages  ## a sync and a scenario with Python 3.11 to 3.13 and ansible-core 2.19 to 2.21 (root); ARGS=3.13/2.21
	@.ci/matrix $(ARGS)

sanity: setup  ## what is shipped, as ansible-test sees it
	@.ci/ansible-test sanity
	@# What the others test knows nothing of Ansible; `make test` runs them all.
	@.ci/ansible-test units tests/unit/plugins/

pictures: setup  ## docs/images anew, taken of the pages in Chromium
	@AKP_WRITE_DOCS=1 $(BIN)/pytest -q tests/page

docs: setup  ## the pages and a reference of playbooks, roles and plugins as a static site, in build/site
	@$(BIN)/python .ci/docs

demo: setup  ## three nodes, a shop, and ansible-playbook at work, in about a minute (root); ARGS="--mode nftables", ARGS=--api
	@$(BIN)/python -m tests.lab.demo $(ARGS)

tutorial: setup controlplane  ## a shell in a small cluster, to follow docs/tutorial.md (root)
	@$(BIN)/python -m tests.controlplane.kubeadm

bench: setup  ## speed as ratios, all from one run (root)
	@$(BIN)/python -m tests.bench $(ARGS)

controlplane:  ## kube-apiserver and kube-proxy, compiled once (Go); KUBERNETES=1.36 for an older one
	@tests/controlplane/build $(KUBERNETES)

conformance: setup controlplane  ## the rules of a real kube-proxy against ours (root)
	@tests/controlplane/build 1.25 >/dev/null
	@# What needs no control plane is part of `make test`.
	@$(BIN)/pytest -q --numprocesses 2 --dist loadfile -m 'controlplane and not soak' tests/conformance
	@$(BIN)/python -m tests.conformance $(if $(KUBERNETES),--kubernetes $(KUBERNETES)) $(ARGS)

record-goldens: setup controlplane  ## tests/conformance/goldens anew, from a real kube-proxy (root)
	@$(BIN)/python -m tests.conformance --record $(ARGS)

release: setup  ## collection, wheel, SBOM and checksums of the last commit in dist; the same bytes each time
	@$(BIN)/python .ci/release

clean:  ## everything that make made, except system packages
	@rm -rf $(VENV) build dist collections tests/output .ansible .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@find plugins tests -name __pycache__ -prune -exec rm -rf {} +
