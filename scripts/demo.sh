# shellcheck shell=bash
# What scripts/run and scripts/down share: where the demo's node lives, and how its agent is started and ended.

RUN=${RUN:-$ROOT/run}               # everything of the demo's node
REGISTRY_PORT=${REGISTRY_PORT:-5077} # examples/*.yaml name this port
PROFILE=${PROFILE:-release}          # the cargo profile: release or dev

# demo_check: refuses places and ports that cannot work, before anything is made.
demo_check() {
  [[ $RUN == /* ]] || RUN=$PWD/$RUN
  # A Unix socket's path has at most 107 bytes (unix(7)); the longest of ours is RUN/vm/qemu-kvm/UUID/serial.sock.
  ((${#RUN} <= 45)) || die "$RUN is too long a path for the sockets in it; choose a shorter one: RUN=/var/tmp/bcd make run"
  [[ $RUN =~ ^[A-Za-z0-9/._-]+$ ]] || die "$RUN has characters that a configuration file would have to escape; choose another: RUN=/var/tmp/bcd make run"
  export BCD_NODE_SOCKET=$RUN/agent.sock
}

# demo_lock: one make run or make down at a time works on a RUN; the lock ends with the process.
demo_lock() {
  mkdir -p "$(target_dir)"
  exec 8>"$(target_dir)/demo-$(cksum <<<"$RUN" | cut -d' ' -f1).lock"
  flock -n 8 && return
  say "waiting for another make run or make down to finish its part"
  flock -w 300 8 || die "another make run or make down works on $RUN since 5 minutes"
}

demo_unlock() { exec 8>&-; }

demo_binary() { printf '%s/%s/bcd-node' "$(target_dir)" "${PROFILE/#dev/debug}"; }

demo_build() {
  local binary
  binary=$(demo_binary)
  say "building bcd-node (cargo build --profile $PROFILE; the first time takes some minutes)"
  cargo build --locked --manifest-path "$ROOT/Cargo.toml" --profile "$PROFILE" -p node-agent 8>&- ||
    die "cargo could not build bcd-node; the lines above say why"
  [[ -x $binary ]] || die "cargo built no $binary"
}

# bcd ARGUMENTS...: the command line of the demo's agent, from the copy that runs.
bcd() { "$RUN/bcd-node" "$@" 8>&-; }

demo_config() {
  mkdir -p "$RUN"
  chmod 755 "$RUN"
  [[ -s $RUN/node-id ]] || cat /proc/sys/kernel/random/uuid >"$RUN/node-id"
  cat >"$RUN/config.toml.new" <<C
# Made by make run. Every key is explained in docs/config.md.
# An identity of its own, so that the demo never takes another agent's machines for its own.
node_id = "$(<"$RUN/node-id")"
socket = "$RUN/agent.sock"
state_dir = "$RUN/state"
run_dir = "$RUN/vm"

[qemu]
accel = "auto"
allow_tcg = true

[images]
dir = "$RUN/images"
insecure_registries = ["127.0.0.1:$REGISTRY_PORT"]

[volumes]
dir = "$RUN/volumes"

[network]
# Links and tables of another agent on this host have other names.
prefix = "run"
C
  mv "$RUN/config.toml.new" "$RUN/config.toml"
}

# demo_agent_start: starts the agent as a child of this script and waits until it answers.
demo_agent_start() {
  local pid tries
  "$RUN/bcd-node" run --config "$RUN/config.toml" </dev/null >>"$RUN/agent.log" 2>&1 8>&- &
  pid=$!
  process_record "$pid" "$RUN/agent.process" || true
  for ((tries = 0; tries < 300; tries++)); do
    if [[ -S $RUN/agent.sock ]] && bcd get instance >/dev/null 2>&1; then return; fi
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 15 "$RUN/agent.log" >&2
  process_end "$RUN/agent.process" 5
  die "the agent did not come up; the lines above are from $RUN/agent.log"
}

# demo_leftovers: processes that have to do with RUN, one "pid command" a line.
demo_leftovers() {
  local pid
  for pid in $(processes_of "$RUN"); do printf '%s %s\n' "$pid" "$(command_of "$pid" | cut -c -120)"; done
}
