"""What a weight swap costs: whoever streams (`stall`), a fleet (`fleet`), an idle instance (`staging`), the prefix
cache (`prefix_cache`), and thousands of them one after the other (`soak`). `chart` draws the figures."""
