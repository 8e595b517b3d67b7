"""Processes killed and frozen, links cut and made bad, at random, on three hosts under load: `hotswap bench chaos`."""
