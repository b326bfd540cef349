"""Updates that send only the changed elements."""
