"""The swap transaction: its records, the coordinator, the instances' side of it, and the pure decisions of both."""
