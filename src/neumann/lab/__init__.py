"""The lab: train, compare and sweep optimizers on real data (extra `lab`)."""
