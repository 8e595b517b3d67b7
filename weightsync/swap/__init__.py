"""The swap transaction: the coordinator, the instances' side of it, and the pure decisions of both."""
