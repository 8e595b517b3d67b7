"""Versions in shared memory: the arena of slots, who may use which slot, and reading what lies in one."""
