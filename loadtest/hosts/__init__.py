"""Several hosts on one machine: network namespaces, joined by a bridge, whose links can be cut and made bad."""
