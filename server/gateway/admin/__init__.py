"""The control routes of the admin port, and the work behind them."""
