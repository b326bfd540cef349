"""Tests of what two to four trainer processes compute together."""
