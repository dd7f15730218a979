# Thin names for the scripts in scripts/. Variables (ONCE, RUN, PROFILE, EXAMPLES, REGISTRY_PORT, FILTER) go to them by environment.

.DEFAULT_GOAL := help
.PHONY: help run down test soak lint bench crash fmt

help: ## this list
	@echo "bcd-node: a node agent for hosts of virtual machines"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "    make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Start with:  sudo -E env \"PATH=\$$PATH\" make run"

run: ## set up the host, build, boot examples/hello.yaml and keep the agent in this terminal (ONCE=1: tear down and check)
	@scripts/run

down: ## remove everything that make run made
	@scripts/down

test: ## the whole suite on real parts, as root (FILTER=name: some of it)
	@scripts/test

soak: ## the long runs: a million operations of the model test (OPERATIONS=n, FIRST=seed)
	@scripts/soak

lint: ## formatting, clippy, documentation, shell scripts, licences
	@scripts/lint

bench: ## what it costs, beside the same work by hand
	@scripts/bench

crash: ## kill the agent at every fault point of every story; writes docs/fault-matrix.md
	@scripts/crash

fmt: ## format the Rust code
	@cargo fmt --all
