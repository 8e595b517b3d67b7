raise ImportError("broken on purpose")
