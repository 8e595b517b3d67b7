"""A version in bytes: manifest and slot, digests and fingerprint, deltas, and comparing versions."""
