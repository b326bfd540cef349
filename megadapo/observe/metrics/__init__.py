"""The metrics of a step: names, records, writers."""
