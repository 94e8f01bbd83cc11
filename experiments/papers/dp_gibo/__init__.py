"""DP-GIBO's experiments: objectives with exact, public losses, and the searches that are compared on them."""
