"""The page at `/console`: static files (static/) and what serves them (files.py). On the public port the chat alone."""
