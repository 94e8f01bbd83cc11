"""`python -m dpray.experiments` is the `dpray` command: what a job runs, whose package has no script of its own."""

from dpray.experiments.cli import main

main()
