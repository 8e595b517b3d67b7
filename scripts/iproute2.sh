#!/usr/bin/env bash
# Makes sure that there are `ip` and `tc`, with which the tests make several hosts out of one: Debian's iproute2, which is
# installed as root. Without root they would be of no use: only root may plug network namespaces together.
set -euo pipefail

if command -v ip >/dev/null && command -v tc >/dev/null || [ "$(id -u)" != 0 ]; then
  exit 0
fi
unavailable() {
  echo "scripts/iproute2.sh: $1; the tests of several hosts will be skipped" >&2
  exit 0
}
command -v apt-get >/dev/null || unavailable "no ip and tc on PATH, and no apt-get to get them with"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; } >/dev/null 2>&1 ||
  unavailable "apt-get could not install iproute2"
