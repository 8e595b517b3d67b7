"""What this gateway counts, and how it is read."""
