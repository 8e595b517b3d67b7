"""Who may ask for what: keys, and whose prefix cache a key may hit."""
