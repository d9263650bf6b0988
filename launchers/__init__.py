"""The code behind setup.sh, train_rtx5090.sh and their .bat files; needs only the standard library."""
