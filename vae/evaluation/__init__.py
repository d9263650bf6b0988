"""How good reconstructions are: metrics, baselines and the sums of a validation."""
