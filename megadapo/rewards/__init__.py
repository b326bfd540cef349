"""Verdicts on answers: DAPO's string rules, and a symbolic second opinion beside them."""
