"""The instances as this gateway sees them, and the choice among them."""
