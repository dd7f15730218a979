# shellcheck shell=bash
# What the scripts share: messages with times, checks, and processes that are ended by identity and never by a pid alone.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export ROOT
STARTED=${STARTED:-$EPOCHREALTIME}
export STARTED
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin
export PATH

# seconds_since START: the seconds since a value of $EPOCHREALTIME, with one digit.
seconds_since() {
  local us=$(((${EPOCHREALTIME/[.,]/} - ${1/[.,]/}) / 100000))
  printf '%d.%d' $((us / 10)) $((us % 10))
}

# say TEXT...: one line of progress with the time since the start.
say() { printf '[%6s s] %s\n' "$(seconds_since "$STARTED")" "$*"; }

# warn TEXT...: the same on standard error.
warn() { say "$*" >&2; }

# die TEXT...: says why and ends with status 1.
die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# need_root WHY
need_root() {
  [[ $EUID -eq 0 ]] || die "must run as root, because it $1. Try: sudo -E env \"PATH=\$PATH\" ${2:-$0}"
}

# target_dir: where cargo builds, and where caches of ours are.
target_dir() { printf '%s' "${CARGO_TARGET_DIR:-$ROOT/target}"; }

# process_start PID: the start time of a process in clock ticks since boot (field 22 of /proc/PID/stat); fails when there
# is no such process or it is a zombie. A pid with its start time names one process for the whole life of the host.
process_start() {
  local stat
  { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 1
  stat=${stat##*) }
  local fields
  read -ra fields <<<"$stat"
  [[ ${fields[0]} != Z && ${fields[0]} != X ]] || return 1
  printf '%s' "${fields[19]}"
}

# process_record PID FILE: keeps a process's identity.
process_record() {
  local start
  start=$(process_start "$1") || return 1
  printf '%s %s\n' "$1" "$start" >"$2.new"
  mv "$2.new" "$2"
}

# process_pid FILE: prints the pid of the recorded process if that very process still lives.
process_pid() {
  local pid start
  [[ -f $1 ]] && read -r pid start <"$1" || return 1
  [[ $pid =~ ^[0-9]+$ && $(process_start "$pid") == "$start" ]] || return 1
  printf '%s' "$pid"
}

# wait_gone FILE SECONDS: waits until the recorded process is gone.
wait_gone() {
  local tenths=$(($2 * 10)) pid
  while pid=$(process_pid "$1"); do
    ((tenths-- > 0)) || return 1
    # Returns at once when the process is gone, on hosts whose tail watches it.
    sleep 0.1
  done
}

# process_end FILE SECONDS: asks the recorded process to end, ends it after SECONDS, and forgets it.
process_end() {
  local pid
  if pid=$(process_pid "$1"); then
    kill -TERM "$pid" 2>/dev/null || true
    if ! wait_gone "$1" "$2"; then
      kill -KILL "$pid" 2>/dev/null || true
      wait_gone "$1" 5 || die "process $pid does not end, not even by SIGKILL; see /proc/$pid/stack"
    fi
  fi
  rm -f "$1"
}

# processes_of DIR: the pids of the processes that have to do with a directory: they run from it, in it, name it in their
# arguments, or have a file of it open.
processes_of() {
  local dir=$1 proc pid
  {
    find /proc/[0-9]*/fd -maxdepth 1 -lname "$dir/*" -printf '%h\n' 2>/dev/null | cut -d/ -f3
    for proc in /proc/[0-9]*; do
      if [[ $(readlink "$proc/exe" 2>/dev/null) == "$dir"/* || $(readlink "$proc/cwd" 2>/dev/null)/ == "$dir"/* ]] ||
        [[ $(command_of "${proc#/proc/}") == *"$dir/"* ]]; then
        echo "${proc#/proc/}"
      fi
    done
  } | sort -un | while read -r pid; do
    # Not ourselves, and no zombies: they hold nothing.
    [[ $pid != "$$" && $pid != "$BASHPID" && $pid != "$PPID" ]] || continue
    if process_start "$pid" >/dev/null; then echo "$pid"; fi
  done
}

# command_of PID
command_of() { { tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null || true; }
