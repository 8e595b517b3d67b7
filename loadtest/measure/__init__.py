"""What figures are made of: the machine they belong to, CPU time, gaps between tokens, charts."""
