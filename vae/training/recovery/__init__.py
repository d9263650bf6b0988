"""What keeps a run safe: signals, the watchdog, and the way back from a divergence."""
