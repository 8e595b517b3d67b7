"""The parts of figures: the machine they belong to, CPU time, gaps between tokens, charts."""
