#!/bin/sh
# Make a virtual environment with torch and the newest Python that its CPU build supports.
#
#     tools/make_venv.sh VENV [PYTHON]
#
# Without PYTHON it keeps the Python of VENV, or takes the newest of 3.11 to 3.13 on the PATH for which
# the package index has torch. TORCH_INDEX is an additional index. This is plain sh, as the machine's
# Pythons are unknown before they are tried.
set -eu

venv=$1
torch=$(grep '^torch==' "$(dirname "$0")/../requirements/cpu.lock")
without_torch="" without_venv=""

fail() {
    echo "$*" >&2
    exit 1
}

for python in ${2:-"$venv/bin/python" python3.13 python3.12 python3.11 python3}; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case $version in 3.11 | 3.12 | 3.13) ;; *) continue ;; esac
    case " $without_torch " in *" $version "*) continue ;; esac
    # Debian and Ubuntu ship a Python whose venv cannot install pip
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        without_venv=${without_venv:-$version}
        continue
    fi
    [ "$python" = "$venv/bin/python" ] || "$python" -m venv --clear "$venv"
    if output=$("$venv/bin/pip" install --quiet --no-deps \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch" 2>&1); then
        echo "$venv: Python $version${without_torch:+ (no $torch for$without_torch)}"
        exit 0
    fi
    case $output in *"No matching distribution"*) ;; *) fail "$output" ;; esac
    without_torch="$without_torch $version"
done

if [ -n "$without_torch" ]; then
    echo "$output" >&2
    fail "No $torch for Python$without_torch: make TORCH_INDEX=<the URL of PyTorch's CPU wheel index>"
elif [ -n "$without_venv" ]; then
    fail "Python $without_venv has no venv: apt install python$without_venv-venv"
elif [ -n "${2:-}" ]; then
    fail "PYTHON=$2 is no Python 3.11, 3.12 or 3.13"
fi
fail "No Python 3.11, 3.12 or 3.13: apt install python3-venv (Debian 12 or 13, Ubuntu 24.04)," \
    "or make PYTHON=/path/to/python3.13"
