"""Every architecture of vLLM's registry, tiny: is its model after swaps and rollbacks the one that stock vLLM loads?"""
