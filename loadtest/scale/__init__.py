"""The cost of a swap to a cluster that does not exist: the planner of weightsync/peer in a simulated network."""
