"""Settings and hooks of schemathesis; tests/server/test_openapi*.py run it."""
