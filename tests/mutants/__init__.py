"""Semantic mutations of the pure logic, and the tests that must notice each of them. `make mutants` runs them."""
