"""Several processes on one port: who starts them, what each is told, and how a scrape of one shows all."""
