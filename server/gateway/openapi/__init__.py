"""`GET /openapi.json` of both ports: what can be asked, what answers, and how it fails."""
