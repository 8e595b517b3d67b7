"""Who goes next when there is more work than the instances can run: a bounded, fair line in front of routing."""
