"""The parts of the gateway's benchmark (loadtest/gateway.py)."""
