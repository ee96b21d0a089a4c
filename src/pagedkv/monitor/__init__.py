"""Seeing it: what happens to pages and requests, as metrics, frames of a page map, events for routers, and records."""
