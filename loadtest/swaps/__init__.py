"""The cost of a weight swap: to streams (`stall`), a fleet (`fleet`), an idle instance (`staging`), the prefix cache
(`prefix_cache`), and of thousands of them one after the other (`soak`). `chart` draws the figures."""
