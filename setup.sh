#!/bin/sh
# Creates the Python environment; with --test it also runs the tests. --help lists the flags.
# This file finds a Python; launchers/environment.py does the rest, shared with setup_windows.bat.
script=${BASH_SOURCE:-$0}
while [ -L "$script" ]; do
    target=$(readlink -- "$script")
    case $target in /*) script=$target ;; *) script=$(dirname -- "$script")/$target ;; esac
done
case ${ZSH_EVAL_CONTEXT:-} in *:file*) script='' ;; esac
[ "${BASH_SOURCE:-$0}" = "$0" ] || script='' # sourced: what follows would change or end the user's shell
if [ ! -f "$script" ] || [ ! -f "$(dirname -- "$script")/launchers/environment.py" ]; then
    echo "Run this file instead of sourcing it, in the folder of the project: sh ./setup.sh" >&2
    return 1 2>/dev/null || exit 1
fi
set -u
CDPATH='' cd -- "$(dirname -- "$script")" || exit 1
export PYTHONUTF8=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONHOME PYTHONPATH PYTHONSAFEPATH # packages of another Python are no part of the environment
trap 'exit 130' INT # or an interrupted test of a Python would fail, and the next one would be taken

too_old='' incomplete=''
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    "$name" -c 'import sys' >/dev/null 2>&1 || continue
    if ! "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10) or sys.maxsize < 2**32)'; then
        too_old=$name
    elif ! "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        incomplete=$name
    else
        exec "$name" -m launchers.environment "$@"
    fi
done

{
    if [ -n "$incomplete" ]; then
        echo "Set-up stopped: $incomplete lacks venv or ensurepip. Install them:"
    elif [ -n "$too_old" ]; then
        echo "Set-up stopped: $("$too_old" --version 2>&1) is too old or 32-bit. Install Python 3.10 or newer, 64-bit:"
    else
        echo "Set-up stopped: no Python found. Install 3.10 or newer:"
    fi
    echo "  Debian, Ubuntu, WSL:  sudo apt install python3 python3-venv"
    echo "  Fedora:               sudo dnf install python3"
    echo "  Arch:                 sudo pacman -S python"
    echo "  openSUSE:             sudo zypper install python312"
    echo "  macOS:                brew install python@3.12"
    echo "  any older Linux:      python3 -m pip install --user uv && python3 -m uv python install 3.12"
} >&2
exit 1
