"""train_vae.py with the faults in VAE_TEST_FAULTS: `python -m tests.harness.faulty_train FLAGS`.

It records the samples of each step, if VAE_TEST_SAMPLES names a file.
"""

import os

from tests.harness.faults import VARIABLE, faults_from, injected
from tests.harness.sharded_runs import record_samples
from train_vae import main
from vae.system.script import run_script

if __name__ == "__main__":
    with record_samples(), injected(*faults_from(os.environ.get(VARIABLE, "[]"))):
        run_script("train_vae.py", main)
