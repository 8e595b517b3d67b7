"""What figures are made of: the machine they belong to, CPU time by process, gaps between tokens."""
