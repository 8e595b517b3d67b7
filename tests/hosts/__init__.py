"""Tests on several hosts of one machine (loadtest/hosts)."""
