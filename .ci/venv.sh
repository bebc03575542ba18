#!/bin/sh
# Make a virtual environment with pip in it: venv.sh DIRECTORY
#
# From /usr/bin/python3 where that is 3.11 or newer: a container that shares /usr then has the same interpreter, and an
# unprivileged one cannot read a python in somebody's home. Debian splits ensurepip off; then another pip lends itself.
set -eu
directory=$1

# One that works is kept: what changed is installed into it.
if "$directory/bin/python" -m pip --version >/dev/null 2>&1; then exit 0; fi

fits() { "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

for python in /usr/bin/python3 python3 python3.13 python3.12 python3.11 none; do
    if [ "$python" != none ] && fits "$python"; then break; fi
done
if [ "$python" = none ]; then
    echo "error: no python to work with" >&2
    echo "  cause: none of /usr/bin/python3 and python3.11 to python3.13 is 3.11 or newer and has the module venv" >&2
    echo "  hint: install Python 3.11 or newer, on Debian: apt-get install python3 python3-venv" >&2
    exit 1
fi

rm -rf "$directory"
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$directory"
elif python3 -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --without-pip "$directory"
    python3 -m pip --python "$directory/bin/python" install -q pip
else
    echo "error: $python cannot make an environment with pip" >&2
    echo "  hint: on Debian: apt-get install python3-venv" >&2
    exit 1
fi
"$directory/bin/python" -m pip install -q --upgrade 'pip>=24'
