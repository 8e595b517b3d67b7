"""The control routes of the admin port, and the two routes of the public port that the app answers with a key."""
