"""Releases: a new version gets more of the traffic step by step, is judged by what its answers show, and is rolled back
by itself where they show harm."""
