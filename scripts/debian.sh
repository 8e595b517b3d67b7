#!/usr/bin/env bash
# Makes sure that this machine has what the tests need beside Python packages: debian.sh VENV TOOL...
#
#   etcd        a store for several hosts, and its client; no service is started
#   chromium    the browser in the tests of the console
#   bubblewrap  the sandbox in which rewards run code that a model wrote
#   iproute2    `ip` and `tc`, with which tests make several hosts out of one
#
# What is not there comes from Debian: root installs it, anybody else unpacks it into VENV/TOOL. A tool that cannot be had
# is one line on stderr: its tests are skipped, or fail where CI=true.
set -uo pipefail
venv=$1
shift

there() {
  case $1 in
    etcd) { command -v etcd && command -v etcdctl; } || [ -x "$venv/etcd/usr/bin/etcdctl" ] ;;
    chromium) command -v chromium || [ -x "$venv/chromium/run" ] ;;
    bubblewrap) command -v bwrap || [ -x "$venv/bin/bwrap" ] ;;
    iproute2) { command -v ip && command -v tc; } || [ "$(id -u)" != 0 ] ;;  # only root may plug namespaces together
    *) echo "scripts/debian.sh: there is no tool $1" >&2; exit 2 ;;
  esac >/dev/null 2>&1
}

packages() {
  case $1 in
    etcd) echo etcd-server etcd-client ;;
    *) echo "$1" ;;
  esac
}

# Unpacks a package and what it needs that this machine lacks. apt reads what is installed, and writes nothing there.
unpack() {
  local tool=$1 download
  download=$(mktemp -d)
  mkdir -p "$download/lists/partial" "$download/cache/archives/partial"
  apt() { apt-get -qq -o Dir::State::lists="$download/lists" -o Dir::Cache="$download/cache" -o Debug::NoLocking=1 "$@"; }
  apt update && apt install -y --no-install-recommends --download-only $(packages "$tool") &&
    rm -rf "${venv:?}/$tool" && mkdir -p "$venv/$tool" &&
    for package in "$download"/cache/archives/*.deb; do dpkg -x "$package" "$venv/$tool" || return; done
  local status=$?
  rm -rf "$download"
  return $status
}

# Chromium finds the libraries that were unpacked beside it through this.
wrap_chromium() {
  local libraries
  libraries=$(find "$venv/chromium" -name '*.so*' -printf '%h\n' | sort -u | sed "s|^$venv/chromium|\$here|" | paste -sd:)
  cat >"$venv/chromium/run" <<RUN
#!/usr/bin/env bash
here=\$(cd "\$(dirname "\$0")" && pwd)
export LD_LIBRARY_PATH="$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec "\$here/usr/lib/chromium/chromium" "\$@"
RUN
  chmod +x "$venv/chromium/run"
}

missing=()
for tool in "$@"; do there "$tool" || missing+=("$tool"); done
[ ${#missing[@]} -gt 0 ] || exit 0
echo "make: Debian's packages for: ${missing[*]}" >&2
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1  # in single-user mode invoke-rc.d starts no service of a package
  apt-get update -qq >/dev/null 2>&1
  wanted=$(for tool in "${missing[@]}"; do packages "$tool"; done)
  apt-get install -y -qq --no-install-recommends $wanted >/dev/null 2>&1
fi
for tool in "${missing[@]}"; do
  if ! there "$tool" && [ "$(id -u)" != 0 ] && command -v apt-get >/dev/null && unpack "$tool" >/dev/null 2>&1; then
    [ "$tool" != chromium ] || wrap_chromium
    [ "$tool" != bubblewrap ] || cp "$venv/bubblewrap/usr/bin/bwrap" "$venv/bin/bwrap"
  fi
  there "$tool" || echo "scripts/debian.sh: $tool cannot be had here; install Debian's $(packages "$tool")" >&2
done
exit 0
