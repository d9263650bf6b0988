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
        ./setup.sh --yes || exit
    fi
fi
exec "$python" launchers/training.py "$@"
