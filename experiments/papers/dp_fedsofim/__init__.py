"""DP-FedSOFIM: the paper's experiments, made again. See RESULTS.md."""
