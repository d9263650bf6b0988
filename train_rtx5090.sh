#!/usr/bin/env bash
# Starts a training run; --help lists the choices.
# This file finds the environment; everything else stands in launchers/training.py, shared with train_rtx5090.bat.
set -u
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" || exit 1
export PYTHONUTF8=1

python=${VAE_PYTHON:-}
if [ -z "$python" ]; then
    python=.venv/bin/python
    # The set-up writes the stamp last, so an interrupted one is completed here.
    if [ ! -x "$python" ] || [ ! -e .venv/.setup-stamp.json ]; then
        # Help is answered by any Python, before gigabytes are downloaded.
        case ${1:-} in
            -h | --help) exec python3 -m launchers.training --help ;;
            *) ./setup.sh --yes || exit ;;
        esac
    fi
fi
exec "$python" -m launchers.training "$@"
