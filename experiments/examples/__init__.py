"""Short programs to start one's own from: `python -m dpray.experiments.examples.NAME`."""
