"""The HTTP service: routes, the scheduler that shares a model among requests, and a page."""
