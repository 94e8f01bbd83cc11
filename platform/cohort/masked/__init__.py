"""The masked sum as a pure protocol: parties and an aggregator that exchange immutable messages; no Ray, no I/O."""
