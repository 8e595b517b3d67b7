"""Training loops of other projects, with Hotswap as their server."""
