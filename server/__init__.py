"""What clients reach: the gateway (public port) and the instances it stands in front of."""
