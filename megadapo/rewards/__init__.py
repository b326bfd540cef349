"""Scores of responses: DAPO's string rules, a symbolic comparison, and users' functions."""
