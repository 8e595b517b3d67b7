"""The cost of a weight swap: to streams (`stall`, also beside another checkout: `against`), a fleet (`fleet`), sessions
(`sessions`), of a rollback by a release (`rollback`), and of thousands of swaps (`soak`). `chart` draws the figures."""
