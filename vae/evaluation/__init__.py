"""Measure VAEs: metrics, baselines, validation sums, and the comparison of several VAEs with its report."""
