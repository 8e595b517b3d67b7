"""One file for each subject; `registry.all_checks` imports all of them."""
