"""The gateway, which clients reach on the public port, and the instances behind it."""
