"""Answers as data: captured as they pass, parsed, measured, kept in a log, joined with what users say of them."""
