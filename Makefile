# Thin names for the scripts in scripts/. Variables (ONCE, RUN, PROFILE, EXAMPLES, REGISTRY_PORT, FILTER) go to them by environment.

.DEFAULT_GOAL := help
.PHONY: help run down test lint bench crash fmt

help: ## this list
	@echo "bcd-node: a node agent for hosts of virtual machines"
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/    make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'
	@echo
	@echo "Start with:  sudo -E env \"PATH=\$$PATH\" make run"

run: ## set up the host, build, boot examples/hello.yaml and keep the agent in this terminal (ONCE=1: tear down and check)
	@scripts/run

down: ## remove everything that make run made
	@scripts/down

test: ## the whole suite on real parts, as root (FILTER=name: some of it)
	@scripts/test

lint: ## formatting, clippy, documentation, shell scripts, licences
	@scripts/lint

bench: ## what it costs, beside a shell script that does the same
	@scripts/bench

crash: ## kill the agent at every fault point and see that it converges
	@scripts/crash

fmt: ## format the Rust code
	@cargo fmt --all
