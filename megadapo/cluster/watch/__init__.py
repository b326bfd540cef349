"""Heartbeats, diagnostics of hung processes, and guards against orphans."""
