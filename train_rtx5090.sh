#!/bin/sh
# Starts a training run; --help lists the arguments.
# This file finds the environment; launchers/training.py does the rest, shared with train_rtx5090.bat.
script=${BASH_SOURCE:-$0}
while [ -L "$script" ]; do
    target=$(readlink -- "$script")
    case $target in /*) script=$target ;; *) script=$(dirname -- "$script")/$target ;; esac
done
case ${ZSH_EVAL_CONTEXT:-} in *:file*) script='' ;; esac
[ "${BASH_SOURCE:-$0}" = "$0" ] || script='' # sourced: what follows would change or end the user's shell
if [ ! -f "$script" ] || [ ! -f "$(dirname -- "$script")/launchers/training.py" ]; then
    echo "Run this file instead of sourcing it, in the folder of the project: sh ./train_rtx5090.sh" >&2
    return 1 2>/dev/null || exit 1
fi
set -u
CDPATH='' cd -- "$(dirname -- "$script")" || exit 1
export PYTHONUTF8=1
unset PYTHONSAFEPATH # it would hide the folder launchers

python=${VAE_PYTHON:-}
if [ -z "$python" ]; then
    python=.venv/bin/python
    unset PYTHONHOME PYTHONPATH # of another Python
    # The set-up writes the stamp last. Without it, the set-up was interrupted and runs again.
    if [ ! -x "$python" ] || [ ! -e .venv/.setup-stamp.json ]; then
        # --help works with any Python, before gigabytes are downloaded.
        case ${1:-} in
            -h | --help) exec python3 -m launchers.training --help ;;
            *)
                # A signal that ends this script also ends the set-up: the shell handles it during `wait`.
                setup=
                stop() {
                    [ -z "$setup" ] || { kill "$setup"; wait "$setup"; }
                    exit "$1"
                }
                trap 'stop 129' HUP
                trap 'stop 130' INT
                trap 'stop 143' TERM
                exec 3<&0 # dash replaces the standard input of a background command before <&0
                sh ./setup.sh --yes <&3 3<&- &
                setup=$!
                exec 3<&-
                wait "$setup" || exit
                trap - HUP INT TERM
                ;;
        esac
    fi
fi
exec "$python" -m launchers.training "$@"
