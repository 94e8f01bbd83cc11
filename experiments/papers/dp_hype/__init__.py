"""DP-HYPE: the paper's experiments, made again. See RESULTS.md."""
