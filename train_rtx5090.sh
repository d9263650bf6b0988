#!/usr/bin/env bash
# Starts a training run; --help lists the arguments.
# This file finds the environment; launchers/training.py does the rest, shared with train_rtx5090.bat.
set -u
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" || exit 1
export PYTHONUTF8=1

python=${VAE_PYTHON:-}
if [ -z "$python" ]; then
    python=.venv/bin/python
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
                ./setup.sh --yes <&0 &
                setup=$!
                wait "$setup" || exit
                trap - HUP INT TERM
                ;;
        esac
    fi
fi
exec "$python" -m launchers.training "$@"
