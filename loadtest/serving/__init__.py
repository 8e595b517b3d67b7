"""`hotswap bench serve`: open-loop load (`arrivals`) of real prompts (`prompts`) up to three times saturation, and what
counts of it (`goodput`)."""
