"""check_compatibility.py with a PyTorch that ends the process: its checks run in processes of their own."""

from tests.harness.check_runs import POSIX, checks_of, run_check


@POSIX
def test_torch_that_crashes_the_process(tmp_path, bare):
    for name in ("torch", "torchvision"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "version.py").write_text("__version__ = '2.14.0+cu130'\ncuda = '13.0'\n")
    (tmp_path / "torch/__init__.py").write_text("import os; os.abort()")
    found = run_check(bare, "--json", PYTHONPATH=str(tmp_path), PATH=str(tmp_path))
    assert (found.returncode, found.stderr) == (1, b"")
    check = checks_of(found.stdout)["torch.loads"]
    assert check["status"] == "fail"
    assert "killed by signal 6" in check["found"]
