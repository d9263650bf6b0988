"""The search for settings of `tune_vae.py`: an Optuna study whose trials are runs of `train_vae.py`."""
