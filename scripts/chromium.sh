#!/usr/bin/env bash
# Makes sure that there is a Chromium for the tests of the console: the one on PATH, or Debian's `chromium`, which is
# installed (as root) or unpacked with the libraries it lacks into the virtual environment given as first argument.
set -euo pipefail
venv=${1:-.venv}

if command -v chromium >/dev/null || [ -x "$venv/chromium/run" ]; then
  exit 0
fi
unavailable() {
  echo "scripts/chromium.sh: $1; the tests of the console in a browser will be skipped (they fail where CI=true)" >&2
  exit 0
}
command -v apt-get >/dev/null || unavailable "no chromium on PATH, and no apt-get to get it with"

if [ "$(id -u)" = 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 ||
    unavailable "apt-get could not install chromium"
  exit 0
fi

download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
mkdir -p "$download/lists/partial" "$download/cache/archives/partial" "$download/root"
apt() { apt-get -qq -o Dir::State::lists="$download/lists" -o Dir::Cache="$download/cache" -o Debug::NoLocking=1 "$@"; }
# Only what this machine has not: apt reads what is installed, and writes nothing there.
{ apt update && apt install -y --no-install-recommends --download-only chromium; } >/dev/null 2>&1 ||
  unavailable "apt-get could not download chromium"
for package in "$download"/cache/archives/*.deb; do
  dpkg -x "$package" "$download/root"
done
libraries=$(find "$download/root" -name '*.so*' -printf '%h\n' | sort -u |
  sed "s|^$download/root|\$here/root|" | paste -sd:)
[ -x "$download/root/usr/lib/chromium/chromium" ] || unavailable "the package chromium has no usr/lib/chromium/chromium"
cat >"$download/run" <<RUN
#!/usr/bin/env bash
here=\$(cd "\$(dirname "\$0")" && pwd)
export LD_LIBRARY_PATH="$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec "\$here/root/usr/lib/chromium/chromium" "\$@"
RUN
chmod +x "$download/run"
rm -rf "$venv/chromium"
mkdir -p "$venv/chromium"
mv "$download/root" "$download/run" "$venv/chromium/"
