"""Benchmarks: ratios within one run, with a peer or a physical floor beside each. See README.md in this folder."""
