"""Simulated time, a simulated store, and random schedules of what runs on them."""
