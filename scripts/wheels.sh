#!/usr/bin/env bash
# Builds the wheels of hotswap, hotswap-client and hotswap-bench into a directory: `scripts/wheels.sh PYTHON OUT`. PYTHON has setuptools.
# They are built from a copy: setuptools leaves folders beside what it builds, which a next build would take in.
set -euo pipefail
python="$1" out="$(mkdir -p "$2" && cd "$2" && pwd)"
root="$(cd "$(dirname "$0")/.." && pwd)"
sources="$(mktemp -d)"
trap 'rm -rf "$sources"' EXIT
tar -C "$root" --exclude=__pycache__ --exclude=_compiled --exclude=client/build --exclude=loadtest/build --exclude='*.egg-info' -c \
    server trainer weightsync loadtest client pyproject.toml README.md LICENSE | tar -C "$sources" -x
"$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$out" "$sources" "$sources/client" "$sources/loadtest"
