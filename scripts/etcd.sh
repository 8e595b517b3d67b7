#!/usr/bin/env bash
# Makes sure that there is an etcd for the tests: the one on PATH, or Debian's `etcd-server`, which is installed (as root)
# or unpacked into the virtual environment given as first argument. No service is started.
set -euo pipefail
venv=${1:-.venv}

if command -v etcd >/dev/null || [ -x "$venv/etcd/usr/bin/etcd" ]; then
  exit 0
fi
unavailable() {
  echo "scripts/etcd.sh: $1; the tests of the etcd store will be skipped (they fail where CI=true)" >&2
  exit 0
}
command -v apt-get >/dev/null || unavailable "no etcd on PATH, and no apt-get to get it with"

if [ "$(id -u)" = 0 ]; then
  # RUNLEVEL=1: invoke-rc.d starts nothing in single-user mode, so the package's service stays down.
  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends etcd-server; } >/dev/null 2>&1 ||
    unavailable "apt-get could not install etcd-server"
else
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  mkdir -p "$download/lists/partial" "$download/cache/archives/partial" "$venv/etcd"
  apt() { apt-get -qq -o Dir::State::lists="$download/lists" -o Dir::Cache="$download/cache" "$@"; }
  (cd "$download" && apt update && apt download etcd-server) >/dev/null 2>&1 ||
    unavailable "apt-get could not download etcd-server"
  dpkg -x "$download"/etcd-server_*.deb "$venv/etcd"
fi
