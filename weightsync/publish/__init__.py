"""Publishing: from a trainer's tensors or a checkpoint to a version, on this host, from another, or over HTTP."""
