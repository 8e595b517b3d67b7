"""vLLM's own tests of its HTTP API, from its source distribution, run against a server that is there already."""
