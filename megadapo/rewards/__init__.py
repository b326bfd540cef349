"""Scores of answers: DAPO's string rules, and a symbolic comparison beside them."""
