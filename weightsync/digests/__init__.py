"""Digests and linear checksums of weights: taking, comparing, verifying, telling versions apart."""
