"""A stand-in for train_vae.py that needs milliseconds, and a search that starts it instead of the trainer.

Its PSNR and its loss are functions of the learning rate and the step. `z_channels` selects how a run ends: 5
runs out of memory, 6 diverges, 7 is rejected, 64 and more fail.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.harness.runs import ROOT

STEPS = 9
STUB = """
import json, math, os, signal, sys, time
given = [words.split("\\t") for words in "\\t".join(sys.argv[1:]).split("--")[1:]]
options = {name: [value for value in values if value] for name, *values in given}
(run,) = options["output_dir"]
os.makedirs(run, exist_ok=True)
json.dump(options, open(os.path.join(run, "options.json"), "w"))
ends = {5: (1, "out of memory in a validation"), 6: (76, "loss is not finite"),
        7: (78, "--image_size 64 needs 99 GiB")}
channels = int(options["z_channels"][0])
code, line = (1, "the disk is full") if channels >= 64 else ends.get(channels, (0, ""))
if code:
    print("train_vae.py: " + line, file=sys.stderr)
    sys.exit(code)
saved = os.path.join(run, "checkpoint_step_1.pt")
done = 0
def save(*_):
    open(saved, "w").write(str(done))
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
rate = float(options.get("learning_rate", ["1e-4"])[0])
while done < STEPS:
    done += 1
    psnr = 20 + 5 * math.exp(-(math.log10(rate) + 3) ** 2) * done / STEPS
    record = {"kind": "validation", "step": done, "psnr": psnr, "ssim": 1 / psnr}
    record["loss_reconstruction"] = 45 - psnr
    with open(os.path.join(run, "metrics.jsonl"), "a") as file:
        file.write(json.dumps(record) + "\\n")
    time.sleep(float(os.environ.get("STUB_SECONDS", "0.01")))
open(saved, "w").write(str(done))
"""


def write_stub(folder: Path) -> Path:
    """Write the stub as `folder`/train_vae.py; returns `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "train_vae.py").write_text(STUB.replace("STEPS", str(STEPS)))
    return folder


def start_search(stub: Path, *words: str) -> subprocess.Popen[str]:
    """Start tune_vae.py in a process of its own, with the stub instead of the trainer."""
    script = stub / "patched_tune.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            from pathlib import Path
            sys.path.insert(0, {str(ROOT)!r})
            from vae.tuning import training_process
            training_process.ROOT = Path({str(stub)!r})
            training_process.POLL_SECONDS = 0.02
            from tune_vae import main
            from vae.system.script import run_script
            run_script("tune_vae.py", main)
            """
        )
    )
    return subprocess.Popen(
        [sys.executable, str(script), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def rows_of(folder: Path) -> list[dict]:
    """The lines of trials.jsonl."""
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
