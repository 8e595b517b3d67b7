"""`hotswap up`: the server of one host, from its state directory to its processes."""
